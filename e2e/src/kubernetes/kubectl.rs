//! kubectl and helm as a user runs them.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::limits::KUBECTL_DEADLINE;
use crate::wait;

/// Runs kubectl with a kubeconfig.
#[derive(Debug, Clone)]
pub struct Kubectl {
    program: PathBuf,
    kubeconfig: PathBuf,
    namespace: Option<String>,
}

impl Kubectl {
    /// With this program and this configuration.
    pub fn new(program: PathBuf, kubeconfig: PathBuf) -> Self {
        Self { program, kubeconfig, namespace: None }
    }

    /// The same, with this namespace as the default.
    pub fn within(self, namespace: &str) -> Self {
        Self { namespace: Some(namespace.to_owned()), ..self }
    }

    /// The program.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// The configuration.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// A command for another program (helm, kubectl-forebay) with the same configuration, and with kubectl in its PATH.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        let own = self.program.parent().unwrap_or(Path::new("/")).display().to_string();
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("KUBECONFIG", &self.kubeconfig).env("PATH", format!("{own}:{path}"));
        command
    }

    /// Runs it. Returns its standard output, or an error with its standard error.
    pub fn run(&self, arguments: &[&str]) -> Result<String> {
        self.run_with(arguments, b"")
    }

    /// Same, with this standard input.
    pub fn run_with(&self, arguments: &[&str], input: &[u8]) -> Result<String> {
        let mut command = self.command(&self.program);
        // A server that hangs must not block its caller; 0 would wait indefinitely.
        command.arg(format!("--request-timeout={}s", KUBECTL_DEADLINE.as_secs()));
        command.args(self.namespace.iter().map(|name| format!("--namespace={name}"))).args(arguments);
        output_of(command, input).with_context(|| format!("kubectl {}", arguments.join(" ")))
    }

    /// Applies manifests, server-side.
    pub fn apply(&self, manifests: &str) -> Result<String> {
        self.run_with(
            &["apply", "--server-side", "--force-conflicts", "--field-manager=forebay-lab", "-f", "-"],
            manifests.as_bytes(),
        )
    }

    /// An object or a list as JSON.
    pub fn get(&self, arguments: &[&str]) -> Result<Value> {
        let text = self.run(&[&["get"], arguments, &["-o", "json"]].concat())?;
        Ok(serde_json::from_str(&text)?)
    }

    /// Same; `None` if it does not exist.
    pub fn find(&self, arguments: &[&str]) -> Result<Option<Value>> {
        let text = self.run(&[&["get"], arguments, &["--ignore-not-found", "-o", "json"]].concat())?;
        if text.trim().is_empty() { Ok(None) } else { Ok(Some(serde_json::from_str(&text)?)) }
    }

    /// Polls until the condition holds. On failure, the error contains the output of `describe`. Retries after an error,
    /// unless it is [`wait::Hopeless`].
    pub fn wait_until(
        &self,
        what: &str,
        deadline: Duration,
        holds: impl FnMut() -> Result<bool>,
        describe: impl FnOnce() -> String,
    ) -> Result<()> {
        wait::until(what, deadline, Duration::from_millis(250), holds).map_err(|error| match describe() {
            found if found.is_empty() => error,
            found => anyhow::anyhow!("{error:#}\n{found}"),
        })
    }
}

/// Runs a command to completion.
pub fn output_of(mut command: Command, input: &[u8]) -> Result<String> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("start {:?}", command.get_program()))?;
    let stdin = child.stdin.take();
    let output = std::thread::scope(|scope| {
        if let Some(mut stdin) = stdin {
            // It may end without reading its input: then its own error output shows why.
            scope.spawn(move || stdin.write_all(input));
        }
        child.wait_with_output()
    })?;
    if !output.status.success() {
        let complaint = String::from_utf8_lossy(&output.stderr);
        bail!(
            "{}: {}{}",
            output.status,
            complaint.trim_end(),
            String::from_utf8_lossy(&output.stdout).trim_end()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
