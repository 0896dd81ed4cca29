//! Runs system calls that may hang on dedicated threads.

use std::thread;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::error::Error;

/// Runs `work` on a dedicated OS thread and waits at most `deadline`.
///
/// A mount, an unmount or a statfs that hangs is uninterruptible: the thread then outlives the call. `work` owns the volume's
/// claim, so the volume stays claimed until the thread ends. A thread pool, such as tokio's blocking pool, would be exhausted
/// by a few dead servers.
pub(crate) async fn run_until<T: Send + 'static>(
    what: &'static str,
    deadline: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    let (done, result) = oneshot::channel();
    thread::Builder::new()
        .name(what.replace(' ', "-"))
        .spawn(move || {
            // Nothing waits after the deadline: the mount table then shows the outcome.
            let _ = done.send(work());
        })
        .map_err(|_| Error::Thread(what))?;
    match timeout(deadline, result).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(_)) => Err(Error::Thread(what)),
        Err(_) => Err(Error::Deadline { what, seconds: deadline.as_secs() }),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::in_flight::InFlight;

    #[tokio::test]
    async fn hanging_call_keeps_its_claim_after_the_deadline() {
        let in_flight = InFlight::default();
        let claim = in_flight.claim("v").expect("free");
        let (release, hang) = mpsc::channel::<()>();
        let (ended, end) = oneshot::channel();
        let result = run_until("test", Duration::from_millis(10), move || {
            let _ = hang.recv();
            drop(claim);
            let _ = ended.send(());
        })
        .await;
        assert!(matches!(result, Err(Error::Deadline { what: "test", .. })), "{result:?}");
        assert!(matches!(in_flight.claim("v"), Err(Error::InFlight(_))));
        release.send(()).expect("the thread waits");
        end.await.expect("the thread ends");
        assert!(in_flight.claim("v").is_ok());
    }

    #[tokio::test]
    async fn panic_in_a_call_is_returned_as_an_error() {
        let result = run_until("test", Duration::from_secs(60), || panic!("expected in this test")).await;
        assert!(matches!(result, Err::<(), _>(Error::Thread(_))), "{result:?}");
    }
}
