//! Whom the client connects to.

use std::net::SocketAddr;

use anyhow::Result;

use super::connection::Connection;
use super::handshake::{self, Account};
use super::plan::Plan;

/// A server.
#[derive(Clone)]
pub(crate) enum Target {
    /// One that speaks SMB.
    Smb {
        /// Where it listens.
        address: SocketAddr,
        /// What opens its share.
        account: Account,
    },
    /// A floor, which answers READ and WRITE and nothing else.
    Floor {
        /// Where it listens.
        address: SocketAddr,
    },
}

impl Target {
    /// A new connection, ready for requests.
    pub(crate) fn connect(&self, plan: &Plan) -> Result<Connection> {
        match self {
            Self::Smb { address, account } => {
                handshake::connect(*address, account, plan.credits(), plan.io_bytes)
            }
            Self::Floor { address } => Connection::open_raw(*address, plan.io_bytes),
        }
    }
}
