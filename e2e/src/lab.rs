//! A lab: running nodes, and the operations of a scenario on them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::cache::Cache;
use crate::channel::{Channel, Output};
use crate::guest;
use crate::images::{Images, product};
use crate::limits::{BOOT_DEADLINE, COMMAND_DEADLINE, NODES_MAX, SCRATCH_BYTES};
use crate::machine::{Acceleration, Machine, Specification};
use crate::progress::{say, seconds};
use crate::rundir::RunDir;
use crate::wire::{Exec, Exit, Message};
use crate::{supervise, switch, wait};

/// The specification of a node.
#[derive(Debug, Clone)]
pub struct NodeSpec {
    /// Name, also its host name.
    pub name: String,
    /// MiB of memory.
    pub memory_mib: u32,
    /// Processors under emulation. Under KVM, the node has at least two.
    pub processors: u8,
    /// Bytes of a writable disk, `/dev/vdd`; 0 for none.
    pub scratch_bytes: u64,
    /// Template that its writable disk is a copy of.
    pub scratch_template: Option<PathBuf>,
    /// Whether its writable disk loses unflushed writes in a power cut. That doubles the amount written to it. A disk without
    /// a volatile cache loses nothing.
    pub volatile_cache: bool,
    /// Further read-only disks: `/dev/vde` and so on if the node has a writable one.
    pub disks: Vec<PathBuf>,
    /// Whether its kernel has cifs and ksmbd with SMB Direct, and siw. Debian's kernel has neither.
    pub smb_direct: bool,
}

impl NodeSpec {
    /// The same node with SMB Direct in its kernel.
    pub fn with_smb_direct(self) -> Self {
        Self { smb_direct: true, ..self }
    }
}

/// The node that serves volumes: it has a disk.
pub fn storage() -> NodeSpec {
    NodeSpec {
        name: "storage".into(),
        memory_mib: 1024,
        processors: 1,
        scratch_bytes: SCRATCH_BYTES,
        scratch_template: None,
        volatile_cache: false,
        disks: Vec::new(),
        smb_direct: false,
    }
}

/// A node that mounts volumes.
pub fn client(name: &str) -> NodeSpec {
    NodeSpec {
        name: name.into(),
        memory_mib: 768,
        processors: 1,
        scratch_bytes: 0,
        scratch_template: None,
        volatile_cache: false,
        disks: Vec::new(),
        smb_direct: false,
    }
}

/// A running lab. Dropping it kills its guests and removes its folder.
#[derive(Debug)]
pub struct Lab {
    nodes: BTreeMap<String, Arc<Node>>,
    acceleration: Acceleration,
    // Dropped in this order: guests before the folder of their sockets and disks.
    machines: Vec<Mutex<Option<Machine>>>,
    plan: Option<Plan>,
    rundir: Option<RunDir>,
}

/// Everything needed to start the machines of a lab.
#[derive(Debug)]
struct Plan {
    specs: Vec<NodeSpec>,
    hosts: String,
    images: Images,
    product: PathBuf,
    acceleration: Acceleration,
    folder: PathBuf,
    scratch: PathBuf,
}

impl Plan {
    fn address(index: usize) -> String {
        format!("192.168.77.{}", index + 1)
    }

    fn start(&self, index: usize) -> Result<Machine> {
        let spec = &self.specs[index];
        let specification = Specification {
            name: &spec.name,
            number: index as u8 + 1,
            address: Self::address(index),
            hosts: &self.hosts,
            memory_mib: spec.memory_mib,
            processors: spec.processors,
            scratch_bytes: spec.scratch_bytes,
            scratch_template: spec.scratch_template.as_deref(),
            volatile_cache: spec.volatile_cache,
            disks: &spec.disks,
            smb_direct: spec.smb_direct,
        };
        Machine::start(
            &specification,
            &self.images,
            &self.product,
            self.acceleration,
            &self.folder,
            &self.scratch,
        )
    }

    /// Waits until the machine's agent answers.
    fn greet(&self, index: usize, machine: &mut Machine, started: Instant) -> Result<Arc<Channel>> {
        let name = &self.specs[index].name;
        let channel = Channel::connect(machine.socket())?;
        let deadline = started + self.acceleration.scale(BOOT_DEADLINE);
        let hello = channel
            .wait_for_agent(deadline, || machine.check())
            .with_context(|| format!("{name} did not boot\n{}", machine.console_tail()))?;
        say(format!("{name} is up after {} (kernel {})", seconds(started.elapsed()), hello.kernel));
        Ok(channel)
    }
}

/// One node of a running lab.
#[derive(Debug)]
pub struct Node {
    name: String,
    address: String,
    acceleration: Acceleration,
    // Replaced after a reboot.
    channel: Mutex<Arc<Channel>>,
}

impl Lab {
    /// Boots these nodes under the lab name `name` and waits until all their agents answer.
    ///
    /// The calling thread must live as long as the lab: the kernel kills the guests when it ends.
    pub fn start(name: &str, specs: &[NodeSpec]) -> Result<Self> {
        if specs.is_empty() || specs.len() > NODES_MAX {
            bail!("a lab has 1 to {NODES_MAX} nodes");
        }
        let cache = Cache::open()?;
        let images = if specs.iter().any(|spec| spec.smb_direct) {
            Images::prepare_with_smb_direct(&cache, false)?
        } else {
            Images::prepare(&cache, false)?
        };
        let acceleration = Acceleration::detect(&cache, &images)?;
        let rundir = RunDir::create(name)?;
        switch::start(&rundir.path().join("lan"))?;
        let product = product::make(rundir.path())?;
        let started = Instant::now();
        let names: Vec<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
        say(format!("booting {}", names.join(", ")));
        let hosts: Vec<String> = names
            .iter()
            .enumerate()
            .map(|(index, name)| format!("{name}:{}", Plan::address(index)))
            .collect();
        let plan = Plan {
            specs: specs.to_vec(),
            hosts: hosts.join(","),
            images,
            product,
            acceleration,
            folder: rundir.path().to_owned(),
            scratch: rundir.scratch().to_owned(),
        };
        let mut machines = (0..specs.len()).map(|index| plan.start(index)).collect::<Result<Vec<_>>>()?;
        let mut nodes = BTreeMap::new();
        for (index, machine) in machines.iter_mut().enumerate() {
            let channel = Mutex::new(plan.greet(index, machine, started)?);
            let name = specs[index].name.clone();
            let node = Node { name: name.clone(), address: Plan::address(index), acceleration, channel };
            nodes.insert(name, Arc::new(node));
        }
        let machines = machines.into_iter().map(|machine| Mutex::new(Some(machine))).collect();
        Ok(Self { nodes, acceleration, machines, plan: Some(plan), rundir: Some(rundir) })
    }

    /// Cuts a node's power. Its disk is kept, but a disk with a volatile cache loses its unflushed writes.
    pub fn power_off(&self, name: &str) -> Result<()> {
        let (_, index) = self.place(name)?;
        let machine = self.machines[index].lock().expect("no holder of this lock panics").take();
        let lost = machine.map(Machine::cut_power).transpose();
        if let Some(lost) = lost.with_context(|| format!("cut the power of {name}"))?.flatten() {
            say(format!("{name} lost {lost}"));
        }
        Ok(())
    }

    /// Boots a node after a power cut, and waits until its agent answers.
    ///
    /// The calling thread must live as long as the lab, as with [`Lab::start`].
    pub fn power_on(&self, name: &str) -> Result<()> {
        let (plan, index) = self.place(name)?;
        let mut place = self.machines[index].lock().expect("no holder of this lock panics");
        if place.is_some() {
            bail!("{name} is running");
        }
        let started = Instant::now();
        let mut machine = plan.start(index)?;
        let channel = plan.greet(index, &mut machine, started)?;
        *place = Some(machine);
        *self.node(name).channel.lock().expect("no holder of this lock panics") = channel;
        Ok(())
    }

    /// Pauses or resumes a node's processors. The guest notices only the elapsed time.
    pub fn pause(&self, name: &str, paused: bool) -> Result<()> {
        let (_, index) = self.place(name)?;
        let machine = self.machines[index].lock().expect("no holder of this lock panics");
        machine.as_ref().with_context(|| format!("{name} is not running"))?.pause(paused)
    }

    fn place(&self, name: &str) -> Result<(&Plan, usize)> {
        let plan = self.plan.as_ref().context("another process holds this lab's machines")?;
        let index = plan.specs.iter().position(|spec| spec.name == name);
        Ok((plan, index.with_context(|| format!("this lab has no node {name}"))?))
    }

    /// A node by its name.
    ///
    /// # Panics
    /// If the lab was started without it.
    pub fn node(&self, name: &str) -> &Node {
        self.nodes.get(name).unwrap_or_else(|| panic!("this lab has no node {name}"))
    }

    /// All nodes.
    pub fn nodes(&self) -> impl Iterator<Item = &Arc<Node>> {
        self.nodes.values()
    }

    /// The lab's folder, if the lab runs in this process.
    pub fn folder(&self) -> Option<&Path> {
        self.rundir.as_ref().map(RunDir::path)
    }

    /// Fails if one of the guests has died.
    pub fn check(&self) -> Result<()> {
        for machine in &self.machines {
            if let Some(machine) = machine.lock().expect("no holder of this lock panics").as_mut() {
                machine.check()?;
            }
        }
        Ok(())
    }

    /// How guest code is executed.
    pub fn acceleration(&self) -> Acceleration {
        self.acceleration
    }

    /// The information that another process needs to use the nodes.
    pub fn describe(&self) -> Description {
        Description {
            emulated: self.acceleration == Acceleration::Emulation,
            nodes: self.nodes.values().map(|node| (node.name.clone(), node.address.clone())).collect(),
        }
    }

    /// Attaches to a lab that a supervisor holds. Dropping the result leaves the lab running.
    pub fn attach(folder: &Path) -> Result<Self> {
        let text = std::fs::read(folder.join(DESCRIPTION)).context("the lab is not ready")?;
        let description: Description = serde_json::from_slice(&text)?;
        let acceleration = if description.emulated { Acceleration::Emulation } else { Acceleration::Kvm };
        let mut nodes = BTreeMap::new();
        for (name, address) in description.nodes {
            let channel = Mutex::new(supervise::connect(folder, &name)?);
            nodes.insert(name.clone(), Arc::new(Node { name, address, acceleration, channel }));
        }
        Ok(Self { nodes, acceleration, machines: Vec::new(), plan: None, rundir: None })
    }
}

/// File of the lab's folder that holds its [`Description`].
pub const DESCRIPTION: &str = "nodes.json";

/// A running lab as another process sees it.
#[derive(Debug, Serialize, Deserialize)]
pub struct Description {
    /// Whether guests are emulated: deadlines depend on it.
    emulated: bool,
    /// Names and addresses.
    nodes: Vec<(String, String)>,
}

impl Node {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its IPv4 address.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The stream to its agent.
    pub fn channel(&self) -> Arc<Channel> {
        self.channel.lock().expect("no holder of this lock panics").clone()
    }

    /// Scales a deadline to the speed of this machine.
    pub fn scale(&self, deadline: Duration) -> Duration {
        self.acceleration.scale(deadline)
    }

    /// Runs a shell script. Returns its standard output, or an error with its standard error.
    pub fn run(&self, script: &str) -> Result<String> {
        self.run_within(script, COMMAND_DEADLINE)
    }

    /// Same, with a deadline as on hardware.
    pub fn run_within(&self, script: &str, deadline: Duration) -> Result<String> {
        let output = self.attempt(&["sh", "-euc", script], &[], deadline)?;
        if !output.success() {
            bail!("on {}: {script}\n{}{}", self.name, output.text(), output.complaint());
        }
        Ok(output.text())
    }

    /// Runs a program to completion, regardless of how it ends.
    pub fn attempt(&self, argv: &[&str], stdin: &[u8], deadline: Duration) -> Result<Output> {
        let exec = Exec { argv: argv.iter().map(|word| (*word).to_owned()).collect(), ..Exec::default() };
        self.channel().run(exec, stdin, self.scale(deadline)).with_context(|| format!("on {}", self.name))
    }

    /// Runs a function of the guest binary; arguments and result are sent as JSON.
    pub fn call<R: DeserializeOwned>(&self, function: &str, arguments: &impl Serialize) -> Result<R> {
        self.call_within(function, arguments, COMMAND_DEADLINE)
    }

    /// Same, with a deadline as on hardware.
    pub fn call_within<R: DeserializeOwned>(
        &self,
        function: &str,
        arguments: &impl Serialize,
        deadline: Duration,
    ) -> Result<R> {
        // Through standard input: arguments may contain passwords, and everyone can read a command line.
        let arguments = serde_json::to_vec(arguments)?;
        let output = self.attempt(&[guest::GUEST_BINARY, "call", function], &arguments, deadline)?;
        if !output.success() {
            bail!("{function} on {}: {}", self.name, output.complaint());
        }
        serde_json::from_slice(&output.stdout)
            .with_context(|| format!("{function} on {} answered: {}", self.name, output.text()))
    }

    /// Starts a program that runs in parallel to the scenario and writes lines.
    pub fn spawn(&self, argv: &[&str]) -> Result<Process> {
        let argv: Vec<String> = argv.iter().map(|word| (*word).to_owned()).collect();
        let shown = format!("{} on {}", argv.join(" "), self.name);
        let channel = self.channel();
        let (id, answers) = channel.open(Message::Exec(Exec { argv, stdin: true, ..Exec::default() }))?;
        let acceleration = self.acceleration;
        let (lines, partial, complaint) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Process { shown, channel, id, answers, acceleration, lines, partial, complaint, exit: None })
    }

    /// Starts a program that outlives this call. Its output is in `/var/log/<name>.log`, its PID in `/run/<name>.pid`.
    pub fn start_service(&self, name: &str, argv: &[&str]) -> Result<()> {
        let script = r#"name=$1; shift; setsid "$@" >> "/var/log/$name.log" 2>&1 < /dev/null & echo $! > "/run/$name.pid""#;
        let argv = [&["sh", "-euc", script, "service", name], argv].concat();
        let output = self.attempt(&argv, &[], COMMAND_DEADLINE)?;
        anyhow::ensure!(output.success(), "start {name} on {}: {}", self.name, output.complaint());
        Ok(())
    }

    /// Sends a signal to a service and, if the signal is fatal, waits until it has ended. Returns whether it was running.
    pub fn signal_service(&self, name: &str, signal: &str) -> Result<bool> {
        let script = format!(
            "pid=$(cat /run/{name}.pid 2>/dev/null) && kill -s {signal} $pid 2>/dev/null || {{ echo absent; exit 0; }}; \
             while kill -0 $pid 2>/dev/null; do sleep 0.05; done"
        );
        Ok(self.run(&script)? != "absent")
    }

    /// Whether a service's process exists.
    pub fn service_runs(&self, name: &str) -> Result<bool> {
        Ok(self.run(&format!("kill -0 $(cat /run/{name}.pid) 2>/dev/null && echo yes || echo no"))? == "yes")
    }

    /// The last lines of a service's log.
    pub fn service_log(&self, name: &str) -> String {
        self.run(&format!("tail -n 30 /var/log/{name}.log 2>/dev/null || true")).unwrap_or_default()
    }

    /// Replaces a file atomically and sets these permissions.
    pub fn put(&self, path: &str, content: &[u8], mode: u32) -> Result<()> {
        let script =
            r#"umask 077; mkdir -p "$(dirname "$1")"; cat > "$1.new"; chmod "$2" "$1.new"; mv "$1.new" "$1""#;
        let mode = format!("{mode:o}");
        let output = self.attempt(&["sh", "-euc", script, "put", path, &mode], content, COMMAND_DEADLINE)?;
        if !output.success() {
            bail!("write {path} on {}: {}", self.name, output.complaint());
        }
        Ok(())
    }

    /// Reads a file.
    pub fn get(&self, path: &str) -> Result<Vec<u8>> {
        let output = self.attempt(&["cat", path], &[], COMMAND_DEADLINE)?;
        if !output.success() {
            bail!("read {path} on {}: {}", self.name, output.complaint());
        }
        Ok(output.stdout)
    }

    /// Polls until the condition holds; the deadline is as on hardware. Retries after an error, unless it is
    /// [`wait::Hopeless`].
    pub fn wait_until(
        &self,
        what: &str,
        deadline: Duration,
        holds: impl FnMut() -> Result<bool>,
    ) -> Result<()> {
        wait::until(what, self.scale(deadline), Duration::from_millis(50), holds)
    }
}

/// A program that runs on a node in parallel to the scenario.
#[derive(Debug)]
pub struct Process {
    shown: String,
    channel: Arc<Channel>,
    id: u32,
    answers: Receiver<Message>,
    acceleration: Acceleration,
    lines: Vec<String>,
    partial: Vec<u8>,
    complaint: Vec<u8>,
    exit: Option<Exit>,
}

impl Process {
    /// All lines of its standard output so far.
    pub fn lines(&mut self) -> &[String] {
        while self.exit.is_none() {
            match self.answers.try_recv() {
                Ok(message) => self.take(message),
                Err(_) => break,
            }
        }
        &self.lines
    }

    /// Waits until its output satisfies the condition; the deadline is as on hardware.
    pub fn wait_for(
        &mut self,
        what: &str,
        deadline: Duration,
        holds: impl Fn(&[String]) -> bool,
    ) -> Result<()> {
        let until = Instant::now() + self.acceleration.scale(deadline);
        loop {
            if holds(&self.lines) {
                return Ok(());
            }
            if let Some(exit) = &self.exit {
                let said = String::from_utf8_lossy(&self.complaint).into_owned();
                bail!("{}: ended ({exit:?}) before {what}: {said}", self.shown);
            }
            match self.answers.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(message) => self.take(message),
                Err(RecvTimeoutError::Timeout) => {
                    let last = self.lines.last().map_or("nothing", String::as_str);
                    bail!("{}: {what} not within the deadline; last line: {last}", self.shown)
                }
                Err(RecvTimeoutError::Disconnected) => bail!("{}: the guest is gone", self.shown),
            }
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Stdout(bytes) => {
                self.partial.extend_from_slice(&bytes);
                while let Some(end) = self.partial.iter().position(|byte| *byte == b'\n') {
                    let line: Vec<u8> = self.partial.drain(..=end).collect();
                    self.lines.push(String::from_utf8_lossy(&line[..end]).into_owned());
                }
            }
            Message::Stderr(bytes) => self.complaint.extend_from_slice(&bytes),
            Message::Exit(exit) => self.exit = Some(exit),
            _ => {}
        }
    }

    /// Closes its standard input.
    pub fn close_input(&self) -> Result<()> {
        self.channel.send(self.id, Message::StdinEof)
    }

    /// Waits until it has ended, regardless of how.
    pub fn wait_for_exit(&mut self, deadline: Duration) -> Result<()> {
        let until = Instant::now() + self.acceleration.scale(deadline);
        while self.exit.is_none() {
            match self.answers.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(message) => self.take(message),
                Err(_) => bail!("{}: did not end", self.shown),
            }
        }
        Ok(())
    }

    /// Closes its standard input and waits until it succeeds. Returns all its output.
    pub fn finish(mut self, deadline: Duration) -> Result<Vec<String>> {
        self.close_input()?;
        let until = Instant::now() + self.acceleration.scale(deadline);
        while self.exit.is_none() {
            match self.answers.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(message) => self.take(message),
                Err(_) => bail!("{}: did not end", self.shown),
            }
        }
        let exit = self.exit.take().unwrap_or_default();
        let complaint = String::from_utf8_lossy(&self.complaint).into_owned();
        anyhow::ensure!(exit.code == Some(0), "{}: {exit:?} {complaint}", self.shown);
        Ok(std::mem::take(&mut self.lines))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.exit.is_none() {
            let _ = self.channel.send(self.id, Message::Signal(9));
        }
        self.channel.forget(self.id);
    }
}

/// The console log of a node of the lab in this folder.
pub fn console_path(folder: &Path, node: &str) -> PathBuf {
    folder.join(format!("{node}.console"))
}
