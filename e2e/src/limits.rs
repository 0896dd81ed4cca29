//! Limits of the lab, in one place.

use std::time::Duration;

/// Largest frame between host and guest, payload included.
pub const FRAME_BYTES_MAX: usize = 1 << 20;
/// Payload of a stream frame: small enough not to delay an urgent frame on an emulated guest.
pub const STREAM_CHUNK_BYTES: usize = 64 << 10;
/// Largest Ethernet frame the switch forwards; QEMU's own packet buffer is 68 KiB.
pub const ETHERNET_FRAME_BYTES_MAX: usize = 68 << 10;
/// Frames that wait for a slow port of the switch before further ones are dropped, as in a real switch with a full queue: a
/// full TCP window of 6 MiB in jumbo frames, plus some margin.
pub const SWITCH_QUEUE_FRAMES: usize = 1024;
/// From boot until the agent answers, on hardware; multiplied under emulation.
pub const BOOT_DEADLINE: Duration = Duration::from_secs(20);
/// Default deadline of one command in a guest, on hardware.
pub const COMMAND_DEADLINE: Duration = Duration::from_secs(30);
/// From the start of etcd and the API server until `/readyz`, on a busy machine.
pub const API_SERVER_DEADLINE: Duration = Duration::from_secs(120);
/// Default deadline of one kubectl or helm command, on a busy machine.
pub const KUBECTL_DEADLINE: Duration = Duration::from_secs(60);
/// A Kubernetes node's memory: kubelet, containerd and pods, plus a root file system in memory.
pub const KUBERNETES_NODE_MEMORY_MIB: u32 = 1536;
/// Processors of an emulated Kubernetes node. With one processor, the node that runs target, server and pods together stalled,
/// and the target did not answer for longer than the servers wait.
pub const KUBERNETES_NODE_PROCESSORS: u8 = 2;
/// From kubelet's start until Ready, for several emulated nodes at the same time.
pub const NODE_READY_DEADLINE: Duration = Duration::from_secs(240);
/// Factor by which emulation multiplies every deadline.
pub const EMULATION_FACTOR: u32 = 8;
/// A trial boot that takes longer than this does not count as working acceleration.
pub const TRIAL_BOOT_DEADLINE: Duration = Duration::from_secs(8);
/// How long a child that a command left behind may hold its output open after the command has ended.
pub const OUTPUT_LINGER: Duration = Duration::from_secs(2);
/// Size of the storage node's scratch disk; the file is sparse.
pub const SCRATCH_BYTES: u64 = 8 << 30;
/// Nodes of one lab. The last byte of their addresses must stay unique.
pub const NODES_MAX: usize = 16;
/// Lines of a guest's console shown when it fails.
pub const CONSOLE_TAIL_LINES: usize = 40;

const _: () = assert!(STREAM_CHUNK_BYTES < FRAME_BYTES_MAX);
