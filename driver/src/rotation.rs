//! Another password for a volume, by the command line and not by a CSI call: nothing asks for it in Kubernetes.
//!
//! The Secret has the next password before the server does, and as its password only after that. Whatever a crash cuts
//! off, the Secret's password is one that the server takes, and the next run goes on with the same one.

use std::time::Duration;

use anyhow::Context;
use k8s_openapi::jiff::Timestamp;
use tracing::info;

use crate::cluster::record::Record;
use crate::cluster::{Clusters, Kubernetes};
use crate::config::RotateCredentials;
use crate::error::Error;
use crate::handle::Handle;

/// Does what the command line says, and tells of it on standard output. Whether all of it succeeded.
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
                // One volume's trouble is no reason to leave the others.
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

/// What was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Done {
    /// The Secret has a new password, and the previous one beside it.
    Rotated,
    /// There was no Secret, and there is one now.
    Restored,
    /// Its password is not old enough.
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
    // One that was begun and cut off is done.
    if older_than.is_some_and(is_young) && !record.is_cut_off() {
        return Ok(Done::Young);
    }
    let (record, next) = record.with_next(kubernetes).await?;
    admin.add_credentials(&share, &next).await?;
    record.promote(kubernetes, &next).await?;
    info!(volume_id, "rotated the volume's password");
    Ok(Done::Rotated)
}
