//! Durable opens ([MS-SMB2] 3.3.5.9.6, 3.3.5.9.7, 3.3.5.9.10, 3.3.5.9.12): what clients request and what the server grants.

use crate::limits::{DURABLE_TIMEOUT_DEFAULT_MS, DURABLE_TIMEOUT_MS_MAX};
use crate::status::NtStatus;
use crate::wire::create_context::RequestContext;

/// Properties of a granted durable open.
pub(crate) struct Durable {
    /// Open.DurableOwner.
    pub(crate) username: String,
    pub(crate) client_guid: [u8; 16],
    /// Open.DurableOpenTimeout.
    pub(crate) timeout_ms: u32,
    /// Open.CreateGuid, for version 2.
    pub(crate) create_guid: Option<[u8; 16]>,
}

/// A request for a durable open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DurableRequest {
    /// `DHnQ`.
    V1,
    /// `DH2Q`. Persistent handles are never granted.
    V2 { timeout_ms: u32, create_guid: [u8; 16] },
}

/// A request to reconnect to a durable open after a disconnect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DurableReconnect {
    /// Open.DurableFileId.
    pub(crate) persistent: u64,
    /// From `DH2C`.
    create_guid: Option<[u8; 16]>,
}

impl Durable {
    /// Whether the durable open was granted to this user.
    pub(crate) fn is_owned_by(&self, username: &str) -> bool {
        self.username.eq_ignore_ascii_case(username)
    }
}

impl DurableReconnect {
    /// A request of version 1 names no CreateGuid and matches any open. An open of version 1 has a CreateGuid of zeros.
    pub(crate) fn names(&self, durable: &Durable) -> bool {
        self.create_guid.is_none_or(|guid| guid == durable.create_guid.unwrap_or_default())
    }
}

/// The durability contexts of a CREATE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DurableContexts {
    pub(crate) request: Option<DurableRequest>,
    pub(crate) reconnect: Option<DurableReconnect>,
}

impl DurableContexts {
    /// # Errors
    /// `STATUS_INVALID_PARAMETER` if the contexts contradict each other.
    pub(crate) fn of(contexts: &[RequestContext<'_>], smb3: bool) -> Result<Self, NtStatus> {
        let (mut first, mut second) = (Self::default(), Self::default());
        for context in contexts {
            match *context {
                RequestContext::DurableHandleRequest => first.request = Some(DurableRequest::V1),
                RequestContext::DurableHandleReconnect(id) => {
                    first.reconnect = Some(DurableReconnect { persistent: id.persistent, create_guid: None });
                }
                // Version 2 requires SMB 3.x.
                RequestContext::DurableHandleRequestV2 { timeout_ms, create_guid, .. } if smb3 => {
                    second.request = Some(DurableRequest::V2 { timeout_ms, create_guid });
                }
                RequestContext::DurableHandleReconnectV2 { file_id, create_guid, .. } if smb3 => {
                    second.reconnect = Some(DurableReconnect {
                        persistent: file_id.persistent,
                        create_guid: Some(create_guid),
                    });
                }
                _ => {}
            }
        }
        let none = Self::default();
        // [MS-SMB2] 3.3.5.9.6, 3.3.5.9.7, 3.3.5.9.10: one version, and in version 2 one context.
        match (first, second) {
            (first, second) if second == none => Ok(first),
            (first, Self { request, reconnect })
                if first == none && request.is_some() != reconnect.is_some() =>
            {
                Ok(Self { request, reconnect })
            }
            _ => Err(NtStatus::INVALID_PARAMETER),
        }
    }
}

/// Returns how long an open is kept, in milliseconds, if the client requested `asked`.
pub(crate) fn timeout_ms(asked: u32) -> u32 {
    if asked == 0 { DURABLE_TIMEOUT_DEFAULT_MS } else { asked.min(DURABLE_TIMEOUT_MS_MAX) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::FileId;
    use crate::wire::create_context::DurableFlags;

    const Q1: RequestContext<'_> = RequestContext::DurableHandleRequest;
    const C1: RequestContext<'_> =
        RequestContext::DurableHandleReconnect(FileId { persistent: 7, volatile: 8 });
    const Q2: RequestContext<'_> = RequestContext::DurableHandleRequestV2 {
        timeout_ms: 5,
        flags: DurableFlags::PERSISTENT,
        create_guid: [1; 16],
    };
    const C2: RequestContext<'_> = RequestContext::DurableHandleReconnectV2 {
        file_id: FileId { persistent: 7, volatile: 8 },
        create_guid: [1; 16],
        flags: DurableFlags::empty(),
    };

    #[test]
    fn contradictory_durable_contexts_are_refused() {
        let of = |contexts: &[RequestContext<'_>]| DurableContexts::of(contexts, true);
        let reconnect = |create_guid| Some(DurableReconnect { persistent: 7, create_guid });
        assert_eq!(of(&[RequestContext::QueryOnDiskId]), Ok(DurableContexts::default()));
        assert_eq!(of(&[Q1]), Ok(DurableContexts { request: Some(DurableRequest::V1), reconnect: None }));
        assert_eq!(of(&[C1]), Ok(DurableContexts { request: None, reconnect: reconnect(None) }));
        assert_eq!(of(&[Q1, C1]).map(|a| a.reconnect), Ok(reconnect(None)), "the request is ignored");
        let request = Some(DurableRequest::V2 { timeout_ms: 5, create_guid: [1; 16] });
        assert_eq!(of(&[Q2]), Ok(DurableContexts { request, reconnect: None }));
        assert_eq!(of(&[C2]), Ok(DurableContexts { request: None, reconnect: reconnect(Some([1; 16])) }));
        for contexts in [[Q1, Q2], [Q1, C2], [C1, Q2], [C1, C2], [Q2, C2]] {
            assert_eq!(of(&contexts), Err(NtStatus::INVALID_PARAMETER), "{contexts:?}");
        }
        assert_eq!(
            DurableContexts::of(&[Q2, C2], false),
            Ok(DurableContexts::default()),
            "SMB 2.x knows neither"
        );
    }

    #[test]
    fn requested_durable_timeout_is_granted_up_to_the_limit() {
        assert_eq!(timeout_ms(0), DURABLE_TIMEOUT_DEFAULT_MS);
        assert_eq!(timeout_ms(1), 1);
        assert_eq!(timeout_ms(u32::MAX), DURABLE_TIMEOUT_MS_MAX);
    }
}
