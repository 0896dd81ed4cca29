//! NTLMv2 ([MS-NLMP]): messages, keys, and the acceptor.

mod acceptor;
pub(super) mod keys;
pub(super) mod message;

pub(super) use acceptor::NtlmAcceptor;
