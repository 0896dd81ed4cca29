//! Memory near a device: on a machine with several NUMA nodes, buffers are best allocated on the device's node.

use std::fs;

use rustix::io::Errno;

use crate::PAGE;

/// `MPOL_PREFERRED` of linux/mempolicy.h: that node, or another if it has no memory left.
const PREFERRED: libc::c_ulong = 1;
/// Nodes in a mask of one word.
const NODES_MAX: u32 = libc::c_ulong::BITS;

/// The NUMA node of an RDMA device; `None` if the kernel reports none, as on machines with a single node.
pub(crate) fn node_of(device: &str) -> Option<u32> {
    let text = fs::read_to_string(format!("/sys/class/infiniband/{device}/device/numa_node")).ok()?;
    text.trim().parse().ok()
}

/// Makes the kernel allocate the untouched whole pages of `bytes` on a node.
pub(crate) fn prefer(bytes: &mut [u8], node: u32) -> Result<(), Errno> {
    if node >= NODES_MAX {
        return Err(Errno::INVAL);
    }
    let skip = bytes.as_ptr().align_offset(PAGE).min(bytes.len());
    let length = (bytes.len() - skip) / PAGE * PAGE;
    let mask: libc::c_ulong = 1 << node;
    // SAFETY: the range is within `bytes`; a policy changes no byte of it. The mask is read during the call only. The kernel
    // subtracts one from the number of its bits.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            bytes[skip..].as_ptr(),
            length,
            PREFERRED,
            &raw const mask,
            libc::c_ulong::from(NODES_MAX + 1),
            0,
        )
    };
    if result == 0 { Ok(()) } else { Err(crate::last_errno()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `MPOL_F_ADDR`: the policy of an address.
    const OF_ADDRESS: libc::c_ulong = 2;

    #[test]
    fn prefer_sets_the_memory_policy_of_the_requested_node() {
        let mut bytes = vec![0_u8; 8 << 20].into_boxed_slice();
        match prefer(&mut bytes, 0) {
            Ok(()) => {}
            // A container's syscall filter, or a kernel without NUMA: the kernel places the buffers.
            Err(error @ (Errno::PERM | Errno::NOSYS)) => return assert!(!error.to_string().is_empty()),
            Err(error) => panic!("{error}"),
        }
        let (mut mode, mut mask): (libc::c_int, libc::c_ulong) = (0, 0);
        let middle = bytes[4 << 20..].as_ptr();
        // SAFETY: the results are written to the two variables; the mask has as many bits as specified.
        let result = unsafe {
            let bits = libc::c_ulong::from(NODES_MAX);
            libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, &raw mut mask, bits, middle, OF_ADDRESS)
        };
        assert_eq!((result, mode, mask), (0, PREFERRED as libc::c_int, 1));
        assert_eq!(prefer(&mut bytes, 64), Err(Errno::INVAL));
        assert!(bytes.iter().all(|byte| *byte == 0));
    }
}
