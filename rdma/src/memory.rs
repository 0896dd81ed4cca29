//! The memory of one buffer: its pages, and the region through which a device can access them.

use std::sync::Arc;

use rustix::io::Errno;

use crate::pages::Pages;
use crate::{Device, Region};

/// Memory of a size class.
#[derive(Debug)]
pub(crate) struct Memory {
    /// Declared before the pages: it must be dropped before they are unmapped.
    pub(crate) region: Option<Region>,
    pub(crate) pages: Pages,
}

impl Memory {
    pub(crate) fn new(bytes: usize, device: Option<&Arc<Device>>) -> Result<Self, Errno> {
        let mut pages = Pages::new(bytes)?;
        if let Some(device) = device
            && let Some(node) = device.numa_node
            && let Err(error) = crate::numa::prefer(&mut pages, node)
        {
            tracing::debug!(%error, node, device = device.name(), "payload buffers lie where the kernel puts them");
        }
        let region = device.map(|device| device.register_pages(&mut pages)).transpose()?;
        Ok(Self { region, pages })
    }
}
