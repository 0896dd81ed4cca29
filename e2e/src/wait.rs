//! Waiting for a condition, with a deadline.

use std::time::{Duration, Instant};

use anyhow::{Error, Result};

/// An error that a retry cannot resolve. It ends a wait immediately. A wait treats any other error as a failed poll and
/// retries.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Hopeless(String);

impl Hopeless {
    /// The error with this text.
    pub fn error(text: impl Into<String>) -> Error {
        Error::new(Self(text.into()))
    }

    /// Returns an error with this text unless `good` is true.
    pub fn unless(good: bool, text: impl FnOnce() -> String) -> Result<()> {
        if good { Ok(()) } else { Err(Self::error(text())) }
    }
}

/// Polls until the condition holds. On failure, the error includes the last poll's error, if there was one.
pub(crate) fn until(
    what: &str,
    deadline: Duration,
    interval: Duration,
    mut holds: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let end = Instant::now() + deadline;
    let mut last = None;
    while Instant::now() < end {
        match holds() {
            Ok(true) => return Ok(()),
            Ok(false) => last = None,
            Err(error) if error.is::<Hopeless>() => return Err(error.context(what.to_owned())),
            Err(error) => last = Some(error),
        }
        std::thread::sleep(interval);
    }
    let late = format!("{what}: not within {} s", deadline.as_secs());
    Err(match last {
        Some(error) => error.context(late),
        None => Error::msg(late),
    })
}

#[cfg(test)]
mod tests {
    use anyhow::{Context, bail};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn quick(deadline: Duration, holds: impl FnMut() -> Result<bool>) -> Result<()> {
        until("it is so", deadline, Duration::from_millis(1), holds)
    }

    #[test]
    fn failed_probe_is_repeated() {
        let mut asked = 0;
        quick(LONG, || {
            asked += 1;
            match asked {
                1 => bail!("connection refused"),
                2 => Ok(false),
                _ => Ok(true),
            }
        })
        .expect("the probe succeeds");
        assert_eq!(asked, 3);
    }

    #[test]
    fn hopeless_error_ends_the_wait_immediately() {
        let mut asked = 0;
        let error = quick(LONG, || {
            asked += 1;
            Hopeless::unless(false, || "the writer has ended".into()).context("in its pod")?;
            Ok(true)
        })
        .expect_err("the probe cannot succeed");
        assert_eq!(asked, 1);
        assert_eq!(format!("{error:#}"), "it is so: in its pod: the writer has ended");
    }

    #[test]
    fn timeout_reports_only_the_last_probe() {
        let mut asked = 0;
        let error = quick(Duration::from_millis(50), || {
            asked += 1;
            if asked == 1 { bail!("connection refused") } else { Ok(false) }
        })
        .expect_err("the probe never succeeds");
        assert_eq!(format!("{error:#}"), "it is so: not within 0 s");
    }
}
