//! The tasks of the process: no task may end before the process is asked to stop.

use std::collections::HashMap;

use anyhow::{Context, anyhow};
use tokio::task::{Id, JoinSet};

/// The tasks that run until the process is asked to stop. Dropping this aborts the remaining ones.
#[derive(Debug, Default)]
pub(crate) struct Tasks {
    running: JoinSet<anyhow::Result<()>>,
    names: HashMap<Id, &'static str>,
}

impl Tasks {
    /// Starts a task, which must end when it is asked to stop.
    pub(crate) fn spawn(
        &mut self,
        name: &'static str,
        task: impl Future<Output = anyhow::Result<()>> + Send + 'static,
    ) {
        let handle = self.running.spawn(task);
        self.names.insert(handle.id(), name);
    }

    /// Waits until a task ends prematurely: the process then no longer does its work, even if other tasks continue.
    pub(crate) async fn failure(&mut self) -> anyhow::Error {
        match self.next().await {
            Some((name, Ok(()))) => anyhow!("{name} ended"),
            Some((_, Err(error))) => error,
            None => anyhow!("there is nothing to do"),
        }
    }

    /// Waits for all tasks after they were asked to stop. Returns the first error.
    pub(crate) async fn finish(&mut self) -> anyhow::Result<()> {
        let mut first = Ok(());
        while let Some((_, result)) = self.next().await {
            first = first.and(result);
        }
        first
    }

    async fn next(&mut self) -> Option<(&'static str, anyhow::Result<()>)> {
        let (id, result) = match self.running.join_next_with_id().await? {
            Ok((id, result)) => (id, result),
            Err(error) => (error.id(), Err(anyhow::Error::new(error))),
        };
        let name = self.names.remove(&id).unwrap_or("a task");
        Some((name, result.with_context(|| format!("{name} failed"))))
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::watch;

    use super::*;

    async fn until(mut stop: watch::Receiver<bool>) -> anyhow::Result<()> {
        let _ = stop.wait_for(|stop| *stop).await;
        Ok(())
    }

    #[tokio::test]
    async fn panic_in_a_task_is_reported_as_its_failure() {
        let (stop, stopping) = watch::channel(false);
        let mut tasks = Tasks::default();
        tasks.spawn("the registration", until(stopping.clone()));
        tasks.spawn("the node agent", async { panic!("expected in this test") });
        let error = format!("{:#}", tasks.failure().await);
        assert!(error.contains("the node agent failed") && error.contains("panicked"), "{error}");
        stop.send_replace(true);
        tasks.finish().await.expect("the other one ends well");
    }

    #[tokio::test]
    async fn task_that_ends_before_the_stop_request_is_a_failure() {
        let (stop, stopping) = watch::channel(false);
        let mut tasks = Tasks::default();
        tasks.spawn("serving", until(stopping.clone()));
        tasks.spawn("the device plugin", async { Ok(()) });
        assert_eq!(tasks.failure().await.to_string(), "the device plugin ended");
        tasks.spawn("another", until(stopping));
        stop.send_replace(true);
        tasks.finish().await.expect("on request");
    }

    #[tokio::test]
    async fn error_during_shutdown_is_returned() {
        let mut tasks = Tasks::default();
        tasks.spawn("one", async { Ok(()) });
        tasks.spawn("two", async { Err(anyhow!("cannot remove it")) });
        let error = format!("{:#}", tasks.finish().await.expect_err("one failed"));
        assert_eq!(error, "two failed: cannot remove it");
    }
}
