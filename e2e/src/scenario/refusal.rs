//! Credentials that the server must refuse.

use anyhow::{Result, ensure};

use super::{MIB, ONE, Scenario, scenario};
use crate::site::{Site, Volume};

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario("refused: wrong password", |site| {
            refused(site, |volume, _| volume.password = "not the password".into(), &[])
        }),
        scenario("refused: unknown user", |site| {
            refused(site, |volume, _| volume.username = "unknown-user".into(), &[])
        }),
        scenario("refused: another volume's credentials", |site| {
            refused(
                site,
                |volume, other| {
                    volume.username.clone_from(&other.username);
                    volume.password.clone_from(&other.password);
                },
                &[],
            )
        }),
        scenario("refused: guest", |site| {
            refused(site, |volume, _| volume.password.clear(), &[("guest", "")])
        }),
        scenario("refused: anonymous", |site| refused(site, |_, _| {}, &[("sec", "none")])),
    ]
}

/// `EACCES`, `EPERM` and `EKEYREJECTED`: the kernel's errors for refusals at different stages.
const REFUSALS: [&str; 3] = ["(os error 13)", "(os error 1)", "(os error 129)"];

fn refused(site: &Site, change: impl Fn(&mut Volume, &Volume), options: &[(&str, &str)]) -> Result<String> {
    let volume = site.volume(64 * MIB)?;
    let other = site.volume(64 * MIB)?;
    let node = site.node(ONE);
    let mut wrong = volume.clone();
    change(&mut wrong, &other);
    let error = match site.mount(node, &wrong, options) {
        Ok(_) => anyhow::bail!("it was mounted"),
        Err(error) => format!("{error:#}"),
    };
    ensure!(
        REFUSALS.iter().any(|refusal| error.contains(refusal)),
        "refused, but not for its credentials: {error}"
    );
    // The correct credentials still work: nothing else caused the refusal.
    site.mount(node, &volume, &[])?.unmount()?;
    for volume in [&volume, &other] {
        site.delete(volume)?;
    }
    Ok(String::new())
}
