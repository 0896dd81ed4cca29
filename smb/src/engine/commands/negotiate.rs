//! NEGOTIATE ([MS-SMB2] 3.3.5.3, 3.3.5.4).

use std::sync::Arc;

use crate::auth::negotiate_hint;
use crate::crypto::{Cipher, PreauthHash, SigningAlgorithm};
use crate::engine::config::{Encryption, ServerConfig};
use crate::engine::reports::{Disconnect, Event};
use crate::engine::request::core::{Core, Negotiated};
use crate::engine::request::step::{Ctx, Reply, Step};
use crate::engine::server::Server;
use crate::engine::transforms::Transforms;
use crate::limits;
use crate::status::NtStatus;
use crate::wire::negotiate::{Request, Response};
use crate::wire::negotiate_context::{self as wire, HashAlgorithm, NegotiateContext, POSIX_CREATE_TAG};
use crate::wire::{Capabilities, Command, Dialect, FileTime, Header, SecurityMode, smb1};

/// Best first.
const DIALECTS: [Dialect; 5] =
    [Dialect::SMB3_1_1, Dialect::SMB3_0_2, Dialect::SMB3_0, Dialect::SMB2_1, Dialect::SMB2_0_2];
/// Best first: the fastest strong cipher ([MS-SMB2] 3.3.5.4 leaves the order to the server).
const CIPHERS: [Cipher; 4] = [Cipher::Aes128Gcm, Cipher::Aes256Gcm, Cipher::Aes128Ccm, Cipher::Aes256Ccm];
/// Best first: GMAC costs a tenth of CMAC.
const SIGNING: [SigningAlgorithm; 3] =
    [SigningAlgorithm::AesGmac, SigningAlgorithm::AesCmac, SigningAlgorithm::HmacSha256];
/// Largest I/O of dialect 2.0.2 ([MS-SMB2] 3.3.5.4): one credit's worth.
const IO_BYTES_MAX_2_0_2: u32 = limits::CREDIT_BYTES;

pub(crate) fn handle(ctx: &mut Ctx<'_>) -> Step {
    // [MS-SMB2] 3.3.5.3.1
    if ctx.core.negotiated.is_some() {
        return Step::Disconnect("a second NEGOTIATE");
    }
    let frame = Arc::clone(&ctx.request.frame);
    let message = frame.bytes().get(ctx.request.range.clone()).unwrap_or_default();
    let request = match Request::parse(message) {
        Ok(r) => r,
        Err(e) => return e.into(),
    };
    let salt = ctx.core.random::<32>();
    let config = &ctx.server.config;
    match agree(config, config.min_dialect, ctx.core.over_rdma, &request) {
        Err(status) => Step::Fail(status),
        Ok(agreed) => {
            ctx.core.events.push_back(Event::Negotiated { dialect: agreed.negotiated.dialect.name() });
            let body = response(ctx.server, ctx.now.wall, &agreed, &salt);
            ctx.core.negotiated = Some(agreed.negotiated);
            Step::Reply(Reply::ok(body))
        }
    }
}

/// The properties that both ends support.
struct Agreed {
    negotiated: Negotiated,
    /// Whether the client sent a context of this kind, so that the response must contain one.
    answer_encryption: bool,
    answer_signing: bool,
    answer_transforms: bool,
}

fn agree(
    config: &ServerConfig,
    min_dialect: Dialect,
    over_rdma: bool,
    request: &Request<'_>,
) -> Result<Agreed, NtStatus> {
    if request.dialects.is_empty() {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    // [MS-SMB2] 3.3.5.4: the best dialect that both ends support. Better dialects have higher numbers.
    let mut spoken = DIALECTS.iter().take_while(|dialect| dialect.0 >= min_dialect.0);
    let dialect = *spoken.find(|d| request.dialects.contains(d)).ok_or(NtStatus::NOT_SUPPORTED)?;
    let mut security_mode = SecurityMode::SIGNING_ENABLED;
    if config.signing_required {
        security_mode.insert(SecurityMode::SIGNING_REQUIRED);
    }
    let mut capabilities = Capabilities::empty();
    if dialect != Dialect::SMB2_0_2 {
        capabilities.insert(Capabilities::LARGE_MTU);
        // [MS-SMB2] 3.3.5.4
        if config.caching {
            capabilities.insert(Capabilities::LEASING);
        }
    }
    // [MS-SMB2] 3.3.5.4: for SMB 3.x dialects, if the client supports it, too.
    if !matches!(dialect, Dialect::SMB2_0_2 | Dialect::SMB2_1)
        && request.capabilities.contains(Capabilities::MULTI_CHANNEL)
    {
        capabilities.insert(Capabilities::MULTI_CHANNEL);
    }
    if config.caching
        && config.directory_leases
        && !matches!(dialect, Dialect::SMB2_0_2 | Dialect::SMB2_1)
        && request.capabilities.contains(Capabilities::DIRECTORY_LEASING)
    {
        capabilities.insert(Capabilities::DIRECTORY_LEASING);
    }
    let offered = config.encryption != Encryption::Off;
    let mut cipher = None;
    let mut signing = match dialect {
        Dialect::SMB2_0_2 | Dialect::SMB2_1 => SigningAlgorithm::HmacSha256,
        _ => SigningAlgorithm::AesCmac,
    };
    let (mut answer_encryption, mut answer_signing) = (false, false);
    let mut offered_transforms = None;
    let mut posix = false;
    match dialect {
        Dialect::SMB3_0 | Dialect::SMB3_0_2
            if offered && request.capabilities.contains(Capabilities::ENCRYPTION) =>
        {
            capabilities.insert(Capabilities::ENCRYPTION);
            cipher = Some(Cipher::Aes128Ccm);
        }
        Dialect::SMB3_1_1 => {
            let mut preauth = 0;
            for context in &request.contexts {
                match context {
                    NegotiateContext::PreauthIntegrity { hash_algorithms, .. } => {
                        preauth += 1;
                        if !hash_algorithms.contains(&HashAlgorithm::SHA_512) {
                            return Err(NtStatus::SMB_NO_PREAUTH_INTEGRITY_HASH_OVERLAP);
                        }
                    }
                    NegotiateContext::Encryption { ciphers } => {
                        if ciphers.is_empty() || answer_encryption {
                            return Err(NtStatus::INVALID_PARAMETER);
                        }
                        answer_encryption = true;
                        if offered {
                            cipher = CIPHERS.into_iter().find(|c| ciphers.contains(&wire::Cipher(c.id())));
                        }
                    }
                    NegotiateContext::Signing { algorithms } => {
                        if algorithms.is_empty() || answer_signing {
                            return Err(NtStatus::INVALID_PARAMETER);
                        }
                        if let Some(common) =
                            SIGNING.into_iter().find(|a| algorithms.contains(&wire::SigningAlgorithm(a.id())))
                        {
                            answer_signing = true;
                            signing = common;
                        }
                    }
                    // Only a connection over RDMA uses it.
                    NegotiateContext::RdmaTransform { transforms } if over_rdma => {
                        if transforms.is_empty() || offered_transforms.is_some() {
                            return Err(NtStatus::INVALID_PARAMETER);
                        }
                        offered_transforms = Some(transforms.as_slice());
                    }
                    // [SMB2-POSIX] 3.3.5.4
                    NegotiateContext::Posix { data } => {
                        let (versions, _) = data.as_chunks::<16>();
                        posix |= versions.contains(&POSIX_CREATE_TAG);
                    }
                    _ => {}
                }
            }
            // [MS-SMB2] 3.3.5.4: exactly one preauthentication context.
            if preauth != 1 {
                return Err(NtStatus::INVALID_PARAMETER);
            }
        }
        _ => {}
    }
    let io_bytes_max = if dialect == Dialect::SMB2_0_2 {
        IO_BYTES_MAX_2_0_2
    } else {
        config.io_bytes_max.clamp(IO_BYTES_MAX_2_0_2, limits::IO_BYTES_MAX)
    };
    let negotiated = Negotiated {
        dialect,
        capabilities,
        cipher,
        signing,
        transforms: Transforms::common(offered_transforms.unwrap_or_default(), cipher.is_some()),
        posix,
        preauth: PreauthHash::default(),
        io_bytes_max,
        client_guid: request.client_guid,
        client_capabilities: request.capabilities,
        client_security_mode: request.security_mode,
        client_dialects: request.dialects.clone(),
        security_mode,
    };
    let answer_transforms = offered_transforms.is_some();
    Ok(Agreed { negotiated, answer_encryption, answer_signing, answer_transforms })
}

fn response(server: &Server, now: FileTime, agreed: &Agreed, salt: &[u8; 32]) -> Vec<u8> {
    let n = &agreed.negotiated;
    let mut contexts = Vec::new();
    if n.dialect == Dialect::SMB3_1_1 {
        contexts
            .push(NegotiateContext::PreauthIntegrity { hash_algorithms: vec![HashAlgorithm::SHA_512], salt });
        if agreed.answer_encryption {
            contexts.push(NegotiateContext::Encryption {
                ciphers: vec![n.cipher.map_or(wire::Cipher::NONE, |c| wire::Cipher(c.id()))],
            });
        }
        if agreed.answer_signing {
            contexts
                .push(NegotiateContext::Signing { algorithms: vec![wire::SigningAlgorithm(n.signing.id())] });
        }
        if agreed.answer_transforms {
            contexts.push(NegotiateContext::RdmaTransform { transforms: n.transforms.ids() });
        }
        if n.posix {
            contexts.push(NegotiateContext::Posix { data: &POSIX_CREATE_TAG });
        }
    }
    let mut body = Vec::new();
    Response {
        security_mode: n.security_mode,
        dialect_revision: n.dialect,
        server_guid: server.config.guid,
        capabilities: n.capabilities,
        max_transact_size: n.io_bytes_max,
        max_read_size: n.io_bytes_max,
        max_write_size: n.io_bytes_max,
        system_time: now,
        // [MS-SMB2] 3.3.5.4: implementations may send 0.
        server_start_time: FileTime(0),
        security_buffer: &negotiate_hint(server.config.ntlm, server.config.kerberos.is_some()),
        contexts,
    }
    .encode(&mut body);
    body
}

/// Handles an SMB1 NEGOTIATE ([MS-SMB2] 3.3.5.3): leads to SMB2 if the client supports it, and ends the connection
/// otherwise.
pub(crate) fn multi_protocol(
    core: &mut Core,
    server: &Server,
    now: FileTime,
    message: &[u8],
) -> Result<(Header, Reply), Disconnect> {
    let dialects = smb1::parse_negotiate(message).map_err(|_| Disconnect("malformed SMB1 message"))?;
    let header = Header::request(Command::NEGOTIATE, 0).response(NtStatus::SUCCESS);
    let request = |dialect| Request {
        security_mode: SecurityMode::SIGNING_ENABLED,
        capabilities: Capabilities::empty(),
        client_guid: [0; 16],
        client_start_time: FileTime(0),
        dialects: vec![dialect],
        contexts: Vec::new(),
    };
    if dialects.contains(&smb1::DIALECT_2_WILDCARD) {
        core.wildcard = true;
        // Not a dialect yet: the NEGOTIATE that follows selects one.
        let mut agreed = agree(&server.config, Dialect::SMB2_1, false, &request(Dialect::SMB2_1))
            .map_err(|_| Disconnect("no dialect in common"))?;
        agreed.negotiated.dialect = Dialect::SMB2_WILDCARD;
        return Ok((header, Reply::ok(response(server, now, &agreed, &[0; 32]))));
    }
    if dialects.contains(&smb1::DIALECT_2_002) {
        let agreed = agree(&server.config, server.config.min_dialect, false, &request(Dialect::SMB2_0_2))
            .map_err(|_| Disconnect("no dialect in common"))?;
        let body = response(server, now, &agreed, &[0; 32]);
        core.events.push_back(Event::Negotiated { dialect: agreed.negotiated.dialect.name() });
        core.negotiated = Some(agreed.negotiated);
        return Ok((header, Reply::ok(body)));
    }
    Err(Disconnect("SMB1 is not served"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::negotiate_context::RdmaTransform;

    fn config() -> ServerConfig {
        ServerConfig {
            guid: [0; 16],
            server_name: String::new(),
            started: 0,
            min_dialect: Dialect::SMB2_0_2,
            target_names: Vec::new(),
            ntlm: true,
            kerberos: None,
            signing_required: false,
            encryption: Encryption::Offered,
            instance: 0,
            predecessors: Vec::new(),
            io_bytes_max: limits::IO_BYTES_MAX,
            caching: false,
            directory_leases: false,
        }
    }

    #[test]
    fn invalid_rdma_transform_contexts_are_refused_over_rdma() {
        let some = NegotiateContext::RdmaTransform { transforms: vec![RdmaTransform::SIGNING] };
        let none = NegotiateContext::RdmaTransform { transforms: Vec::new() };
        for (contexts, is_good) in
            [(vec![some.clone()], true), (vec![some.clone(), some], false), (vec![none], false)]
        {
            let preauth = NegotiateContext::PreauthIntegrity {
                hash_algorithms: vec![HashAlgorithm::SHA_512],
                salt: &[],
            };
            let request = Request {
                security_mode: SecurityMode::SIGNING_ENABLED,
                capabilities: Capabilities::empty(),
                client_guid: [0; 16],
                client_start_time: FileTime(0),
                dialects: vec![Dialect::SMB3_1_1],
                contexts: [vec![preauth], contexts].concat(),
            };
            let status = agree(&config(), Dialect::SMB2_0_2, true, &request).map(drop);
            assert_eq!(status, if is_good { Ok(()) } else { Err(NtStatus::INVALID_PARAMETER) });
            assert!(
                agree(&config(), Dialect::SMB2_0_2, false, &request).is_ok(),
                "other transports ignore the context"
            );
        }
    }
}
