//! Transforms that were negotiated for payload sent by RDMA ([MS-SMB2] 2.2.3.1.6).

use crate::wire::negotiate_context::RdmaTransform;

/// Connection.RDMATransformIds ([MS-SMB2] 3.3.1.7).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Transforms {
    pub(crate) encryption: bool,
    pub(crate) signing: bool,
}

impl Transforms {
    /// Returns the transforms that both the client and the server support ([MS-SMB2] 3.3.5.4). Sealing requires a cipher.
    pub(crate) fn common(offered: &[RdmaTransform], has_cipher: bool) -> Self {
        Self {
            encryption: has_cipher && offered.contains(&RdmaTransform::ENCRYPTION),
            signing: offered.contains(&RdmaTransform::SIGNING),
        }
    }

    /// Returns the ids for the response ([MS-SMB2] 2.2.4.1.6).
    pub(crate) fn ids(self) -> Vec<RdmaTransform> {
        let all = [(self.encryption, RdmaTransform::ENCRYPTION), (self.signing, RdmaTransform::SIGNING)];
        let ids: Vec<_> = all.into_iter().filter_map(|(is, id)| is.then_some(id)).collect();
        if ids.is_empty() { vec![RdmaTransform::NONE] } else { ids }
    }
}
