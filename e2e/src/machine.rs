//! One guest: its QEMU process, console and disks, and the acceleration that works on this machine.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

use crate::cache::{Cache, Recipe};
use crate::disk::Disk;
use crate::guest;
use crate::images::{Images, qemu};
use crate::limits::{CONSOLE_TAIL_LINES, EMULATION_FACTOR, TRIAL_BOOT_DEADLINE};
use crate::progress::say;
use crate::rundir;
use crate::tsc;

/// How guest code is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Acceleration {
    /// On the processor.
    Kvm,
    /// By QEMU's translator.
    Emulation,
}

impl Acceleration {
    /// Detects what works here. `/dev/kvm` proves nothing: nested and paravirtual variants of it fail at the first real
    /// kernel, so this boots a kernel, once per boot of this machine.
    pub fn detect(cache: &Cache, images: &Images) -> Result<Self> {
        match std::env::var("FOREBAY_ACCEL").as_deref() {
            Ok("kvm") => return Ok(Self::Kvm),
            Ok("tcg") => return Ok(Self::Emulation),
            Ok(other) => bail!("FOREBAY_ACCEL is {other:?}; it may be kvm or tcg"),
            Err(_) => {}
        }
        if File::options().read(true).write(true).open("/dev/kvm").is_err() {
            say(
                "acceleration: none, /dev/kvm is absent or closed to this user; guests are emulated (slower)",
            );
            return Ok(Self::Emulation);
        }
        let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let recipe = Recipe::default()
            .with("boot", boot_id)
            .with("kernel", images.kernel.key())
            .with("qemu", images.qemu.key())
            .with("user", rustix::process::getuid().as_raw().to_string());
        let entry = cache.get("kvm-trial", &recipe, |into| {
            let verdict = match trial(images, into) {
                Ok(()) => "works".to_owned(),
                Err(error) => format!("{error:#}"),
            };
            fs::write(into.join("verdict"), verdict).map_err(Into::into)
        })?;
        let verdict = fs::read_to_string(entry.file("verdict"))?;
        if verdict == "works" {
            say("acceleration: KVM");
            return Ok(Self::Kvm);
        }
        say(format!(
            "acceleration: none, KVM does not boot the kernel ({verdict}); guests are emulated (slower)"
        ));
        Ok(Self::Emulation)
    }

    /// Scales a deadline to this acceleration.
    pub fn scale(self, deadline: Duration) -> Duration {
        match self {
            Self::Kvm => deadline,
            Self::Emulation => deadline * EMULATION_FACTOR,
        }
    }

    fn arguments(self) -> [&'static str; 4] {
        match self {
            Self::Kvm => ["-accel", "kvm", "-cpu", "host"],
            Self::Emulation => ["-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max"],
        }
    }

    /// The kernel's command line.
    fn command_line(self) -> String {
        match self {
            // From KVM the kernel gets the frequency.
            Self::Kvm => KERNEL_COMMAND_LINE.to_owned(),
            Self::Emulation => tsc::kilohertz().map_or_else(
                || KERNEL_COMMAND_LINE.to_owned(),
                |kilohertz| format!("{KERNEL_COMMAND_LINE} tsc_early_khz={kilohertz}"),
            ),
        }
    }
}

/// `damon_stat.enabled=0`: Debian's 7.2 samples the use of every page, which costs a tenth of an emulated processor.
/// `transparent_hugepage=never`: netfs of 7.2 returns EFAULT for a write if the kernel moves its source page at that moment.
/// `no_timer_check`: on a starved host the emulated timer fires too late for the kernel's check, and the kernel panics.
const KERNEL_COMMAND_LINE: &str = "console=ttyS0 panic=-1 quiet loglevel=4 audit=0 mitigations=off nokaslr \
                                   no_timer_check random.trust_cpu=on tsc=reliable net.ifnames=0 \
                                   damon_stat.enabled=0 transparent_hugepage=never";

/// Boots the kernel without any disk. If it reaches its initrd, KVM executes it.
fn trial(images: &Images, into: &Path) -> Result<()> {
    let console = into.join("console");
    let log = into.join("qemu.log");
    let mut command = pdeathsig(&qemu::command(images.qemu.path()));
    command.args([
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-machine",
        "q35",
        "-no-reboot",
        "-m",
        "512",
    ]);
    command.args(Acceleration::Kvm.arguments());
    command
        .arg("-kernel")
        .arg(images.kernel.file("vmlinuz"))
        .arg("-initrd")
        .arg(images.initrd.file("initrd.cpio"));
    command.args(["-append", KERNEL_COMMAND_LINE]).arg("-serial").arg(format!("file:{}", console.display()));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log)?);
    let mut child = command.spawn().context("start QEMU")?;
    rundir::guard_process(child.id());
    let until = Instant::now() + TRIAL_BOOT_DEADLINE;
    let result = loop {
        let said =
            fs::read(&console).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
        if said.contains("forebay-initrd: no root image") || said.contains("forebay-initrd: module") {
            break Ok(());
        }
        let complaint = fs::read_to_string(&log).unwrap_or_default();
        if let Some(line) = complaint.lines().find(|line| line.contains("KVM") || line.contains("kvm")) {
            break Err(anyhow::anyhow!("{}", line.trim()));
        }
        if child.try_wait()?.is_some() {
            break Err(anyhow::anyhow!("QEMU ended"));
        }
        if Instant::now() > until {
            break Err(anyhow::anyhow!("not up after {} s", TRIAL_BOOT_DEADLINE.as_secs()));
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let _ = child.kill();
    let _ = child.wait();
    rundir::release_process(child.id());
    result
}

/// Wraps the command so that the kernel kills it when the thread that started it ends: no guest outlives its lab.
fn pdeathsig(command: &Command) -> Command {
    let mut wrapped = Command::new("setpriv");
    wrapped.args(["--pdeathsig", "KILL", "--"]).arg(command.get_program()).args(command.get_args());
    wrapped
}

/// The specification of a machine.
#[derive(Debug)]
pub struct Specification<'a> {
    /// Node name.
    pub name: &'a str,
    /// Last byte of its addresses.
    pub number: u8,
    /// Its IPv4 address.
    pub address: String,
    /// `name:address` of all nodes, separated by commas.
    pub hosts: &'a str,
    /// MiB.
    pub memory_mib: u32,
    /// Processors under emulation. Under KVM, the machine has at least two.
    pub processors: u8,
    /// Bytes of its writable disk; 0 for none.
    pub scratch_bytes: u64,
    /// Template that this disk is a copy of.
    pub scratch_template: Option<&'a Path>,
    /// Whether this disk loses unflushed writes in a power cut.
    pub volatile_cache: bool,
    /// Further read-only disks.
    pub disks: &'a [PathBuf],
    /// Whether it has the modules with SMB Direct.
    pub smb_direct: bool,
}

/// A running guest; killed when dropped.
#[derive(Debug)]
pub struct Machine {
    child: Child,
    disk: Option<Disk>,
    console: PathBuf,
    log: PathBuf,
    socket: PathBuf,
}

impl Machine {
    /// Starts QEMU. The calling thread must outlive the machine: the kernel kills the machine when it ends.
    pub fn start(
        specification: &Specification<'_>,
        images: &Images,
        product: &Path,
        acceleration: Acceleration,
        folder: &Path,
        scratch: &Path,
    ) -> Result<Self> {
        let Specification {
            name,
            number,
            address,
            hosts,
            memory_mib,
            processors,
            scratch_bytes,
            scratch_template,
            volatile_cache,
            disks,
            smb_direct,
        } = specification;
        let console = folder.join(format!("{name}.console"));
        let log = folder.join(format!("{name}.qemu.log"));
        let socket = folder.join(format!("{name}.port"));
        // Left over from the machine of this name after a power cut.
        let _ = fs::remove_file(&socket);
        let mut qemu = qemu::command(images.qemu.path());
        qemu.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        qemu.args(["-machine", "q35,mem-merge=off"]).args(acceleration.arguments());
        let processors = if acceleration == Acceleration::Kvm { 2.max(*processors) } else { *processors };
        qemu.arg("-smp").arg(processors.to_string());
        qemu.arg("-m").arg(memory_mib.to_string()).arg("-name").arg(name);
        qemu.arg("-kernel")
            .arg(images.kernel.file("vmlinuz"))
            .arg("-initrd")
            .arg(images.initrd.file("initrd.cpio"));
        qemu.arg("-append").arg(format!(
            "{} forebay.node={name} forebay.address={address} forebay.hosts={hosts}",
            acceleration.command_line()
        ));
        qemu.arg("-serial").arg(format!("file:{}", console.display()));
        // The initrd mounts them in this order: vda root, vdb modules, vdc product, vdd scratch, then the further disks.
        let read_only =
            |image: &Path| format!("file={},if=virtio,format=raw,readonly=on,cache=unsafe", image.display());
        for image in [&images.root.file("root.erofs"), &images.modules(*smb_direct)?, product] {
            qemu.arg("-drive").arg(read_only(image));
        }
        let disk = (*scratch_bytes > 0).then(|| {
            Disk::new(scratch, name, *scratch_bytes)
                .with_template(*scratch_template)
                .with_volatile_cache(*volatile_cache)
        });
        if let Some(disk) = &disk {
            // After a power cut, this is the existing disk of the machine.
            disk.prepare()?;
            qemu.arg("-drive").arg(disk.drive());
            // A request merged to the 1,024 segments that pwritev(2) accepts has no room for the header that blklogwrites
            // adds.
            qemu.args(["-global", "virtio-blk-device.request-merging=off"]);
        }
        for disk in *disks {
            qemu.arg("-drive").arg(read_only(disk));
        }
        qemu.args(["-device", "virtio-rng-pci", "-device", "virtio-serial-pci"]);
        qemu.arg("-chardev").arg(format!("socket,id=agent,path={},server=on,wait=off", socket.display()));
        qemu.arg("-device").arg(format!("virtserialport,chardev=agent,name={}", guest::PORT));
        let lan = folder.join("lan");
        qemu.arg("-netdev")
            .arg(format!("stream,id=lan,server=off,addr.type=unix,addr.path={}", lan.display()));
        qemu.arg("-device").arg(format!(
            "virtio-net-pci,netdev=lan,romfile=,host_mtu={},mac=52:54:00:fb:00:{number:02x}",
            guest::init::MTU
        ));
        let mut command = pdeathsig(&qemu);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log)?);
        let child = command.spawn().context("start QEMU")?;
        rundir::guard_process(child.id());
        let mut machine = Self { child, disk, console, log, socket };
        let until = Instant::now() + Duration::from_secs(20);
        while !machine.socket.exists() {
            machine.check()?;
            if Instant::now() > until {
                bail!("QEMU did not make {}", machine.socket.display());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(machine)
    }

    /// Pauses or resumes it.
    pub fn pause(&self, paused: bool) -> Result<()> {
        let signal = if paused { Signal::STOP } else { Signal::CONT };
        Ok(kill_process(Pid::from_child(&self.child), signal)?)
    }

    /// Cuts its power: a volatile cache of its disk is lost. Returns what was lost, if the disk has such a cache.
    pub fn cut_power(mut self) -> Result<Option<String>> {
        // Stopped first: a thread stops between two system calls, while a killed one may leave half a write in the log.
        let pid = Pid::from_child(&self.child);
        kill_process(pid, Signal::STOP)?;
        // Also returns if QEMU has ended meanwhile; its status is left for the `Child` to collect.
        let options = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while let Err(error) = waitid(WaitId::Pid(pid), options) {
            ensure!(error == Errno::INTR, "wait until QEMU stops: {error}");
        }
        let disk = self.disk.take();
        drop(self);
        disk.map_or(Ok(None), |disk| disk.lose_power())
    }

    /// The socket of its agent's port.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Fails with the last output of QEMU and the guest if the machine is no longer running.
    pub fn check(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            let said = fs::read_to_string(&self.log).unwrap_or_default();
            bail!("QEMU ended with {status}: {}\n{}", said.trim_end(), self.console_tail());
        }
        Ok(())
    }

    /// The last lines of the guest's console.
    pub fn console_tail(&self) -> String {
        console_tail(&self.console)
    }
}

/// The last lines of a console log.
pub fn console_tail(path: &Path) -> String {
    let bytes = fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    let from = lines.len().saturating_sub(CONSOLE_TAIL_LINES);
    format!("--- console, last lines ---\n{}", lines[from..].join("\n"))
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        rundir::release_process(self.child.id());
    }
}
