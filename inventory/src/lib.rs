//! What a host has: RDMA devices and ports, NVMe drives, kernel facts.
