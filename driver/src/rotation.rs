//! Replaces the password of a volume. Done on the command line, not in a CSI call: Kubernetes has no request for it.
//!
//! The Secret stores the next password before the server gets it, and makes it the current password only afterwards. So after a
//! crash at any point, the server accepts the Secret's password, and the next run continues with the same next password.

use std::time::Duration;

use anyhow::Context;
use k8s_openapi::jiff::Timestamp;
use tracing::info;

use crate::cluster::record::Record;
use crate::cluster::{Clusters, Kubernetes};
use crate::config::RotateCredentials;
use crate::error::Error;
use crate::handle::Handle;

/// Executes the command and reports on standard output. Returns whether everything succeeded.
pub(crate) fn run(command: &RotateCredentials) -> anyhow::Result<bool> {
    crate::runtime()?.block_on(async {
        let kubernetes =
            Kubernetes::new(&command.namespace).await.context("find the Kubernetes API server")?;
        let clusters = Clusters::new(kubernetes);
        let ids = match command.all {
            true => clusters.kubernetes().volume_ids().await?,
            false => command.volume_ids.clone(),
        };
        let (mut rotated, mut young, mut failed) = (0, 0, 0);
        for id in &ids {
            match rotate(&clusters, id, command.older_than).await {
                Ok(Done::Young) => young += 1,
                Ok(done) => {
                    rotated += 1;
                    println!("{id}: {}", done.describe());
                }
                // A failure for one volume must not stop the others.
                Err(error) => {
                    failed += 1;
                    eprintln!("{id}: {:#}", anyhow::Error::from(error));
                }
            }
        }
        if command.all {
            println!(
                "{} volumes: {rotated} have a new password, {young} have a recent one, {failed} failed",
                ids.len()
            );
        }
        Ok(failed == 0)
    })
}

/// The outcome for a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Done {
    /// The Secret has a new password, and still contains the previous one.
    Rotated,
    /// The Secret was missing and has been created again.
    Restored,
    /// The password is not old enough.
    Young,
}

impl Done {
    fn describe(self) -> &'static str {
        match self {
            Self::Rotated => {
                "has a new password; existing mounts can use the previous one until the next rotation"
            }
            Self::Restored => "its Secret was lost and has been recreated with a new password",
            Self::Young => "its password is recent",
        }
    }
}

async fn rotate(clusters: &Clusters, volume_id: &str, older_than: Option<Duration>) -> Result<Done, Error> {
    let none = || Error::NoVolume(volume_id.to_owned());
    let Some(Handle::Instance { instance, share }) = Handle::parse(volume_id) else { return Err(none()) };
    let kubernetes = clusters.kubernetes();
    let cluster = clusters.find(instance.cluster()).await?.ok_or_else(none)?;
    let admin = clusters.connect(&cluster, &instance).await?;
    admin.stat(&share).await?.ok_or_else(none)?;
    let Some(record) = Record::find(kubernetes, &share).await? else {
        let made = Record::make(kubernetes, &share, &instance).await?;
        let made = made.ok_or_else(|| Error::Overtaken(share.to_string()))?;
        admin.add_credentials(&share, made.credentials()?).await?;
        info!(volume_id, "recreated the volume's Secret");
        return Ok(Done::Restored);
    };
    if record.instance != instance {
        let found = &record.instance;
        return Err(Error::Refused(format!("Secret {} is of a volume on {found}", Record::name_of(&share))));
    }
    let is_young = |least: Duration| {
        let age = record.since.map(|since| Timestamp::now().duration_since(since));
        age.is_some_and(|age| age.unsigned_abs() < least)
    };
    // An interrupted rotation is completed.
    if older_than.is_some_and(is_young) && !record.is_cut_off() {
        return Ok(Done::Young);
    }
    let (record, next) = record.with_next(kubernetes).await?;
    admin.add_credentials(&share, &next).await?;
    record.promote(kubernetes, &next).await?;
    info!(volume_id, "rotated the volume's password");
    Ok(Done::Rotated)
}
