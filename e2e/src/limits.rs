//! Limits of the lab, in one place.

use std::time::Duration;

/// Largest frame between host and guest, payload included.
pub const FRAME_BYTES_MAX: usize = 1 << 20;
/// Payload of a stream frame: small enough that an urgent frame is not kept waiting on an emulated guest.
pub const STREAM_CHUNK_BYTES: usize = 64 << 10;
/// Largest Ethernet frame the switch forwards; QEMU's own packet buffer is 68 KiB.
pub const ETHERNET_FRAME_BYTES_MAX: usize = 68 << 10;
/// Frames that wait for a slow port of the switch before further ones are dropped, as in a real switch with a full queue:
/// a full TCP window of 6 MiB in jumbo frames, and some more.
pub const SWITCH_QUEUE_FRAMES: usize = 1024;
/// Boot to agent, on hardware; emulation multiplies it.
pub const BOOT_DEADLINE: Duration = Duration::from_secs(20);
/// Default deadline of one command in a guest, on hardware.
pub const COMMAND_DEADLINE: Duration = Duration::from_secs(30);
/// Start of etcd and the API server to `/readyz`, on a busy machine.
pub const API_SERVER_DEADLINE: Duration = Duration::from_secs(120);
/// Default deadline of one kubectl or helm command, on a busy machine.
pub const KUBECTL_DEADLINE: Duration = Duration::from_secs(60);
/// A Kubernetes node's memory: kubelet, containerd and pods, on a root that is memory, too.
pub const KUBERNETES_NODE_MEMORY_MIB: u32 = 1536;
/// Processors of an emulated node of Kubernetes. With one, the node that has bundled target, server and pods was out of it, so
/// that the target did not answer for longer than the servers wait.
pub const KUBERNETES_NODE_PROCESSORS: u8 = 2;
/// From kubelet's start to Ready, for several emulated nodes at once.
pub const NODE_READY_DEADLINE: Duration = Duration::from_secs(240);
/// What emulation multiplies every deadline by.
pub const EMULATION_FACTOR: u32 = 8;
/// A trial boot that takes longer than this does not count as working acceleration.
pub const TRIAL_BOOT_DEADLINE: Duration = Duration::from_secs(8);
/// After a command has ended, how long its output may still be held open by a child it left behind.
pub const OUTPUT_LINGER: Duration = Duration::from_secs(2);
/// Size of the storage node's scratch disk; the file is sparse.
pub const SCRATCH_BYTES: u64 = 8 << 30;
/// Nodes of one lab: the last byte of their address must stay unique.
pub const NODES_MAX: usize = 16;
/// Lines of a guest's console shown when it fails.
pub const CONSOLE_TAIL_LINES: usize = 40;

const _: () = assert!(STREAM_CHUNK_BYTES < FRAME_BYTES_MAX);
