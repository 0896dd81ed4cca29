//! The servers that the client connects to.

use std::net::SocketAddr;

use anyhow::Result;

use super::connection::Connection;
use super::handshake::{self, Account, Terms};
use super::plan::Plan;

/// A server.
#[derive(Clone)]
pub(crate) enum Target {
    /// An SMB server.
    Smb {
        /// Its address.
        address: SocketAddr,
        /// Credentials of its share.
        account: Account,
        /// Credentials of a separate share for the connections that write bursts, if there is one.
        burst: Option<Account>,
    },
    /// A floor, which answers only READ and WRITE.
    Floor {
        /// Its address.
        address: SocketAddr,
    },
}

impl Target {
    /// A new connection, ready for requests.
    pub(crate) fn connect(&self, plan: &Plan) -> Result<Connection> {
        match self {
            Self::Smb { address, account, .. } => Ok(handshake::connect(terms(*address, plan), account)?.0),
            Self::Floor { address } => Connection::open_raw(*address, plan.io_bytes),
        }
    }

    /// All connections of a run. Those of one session are adjacent.
    pub(crate) fn connect_all(&self, plan: &Plan) -> Result<Vec<Connection>> {
        let Self::Smb { address, account, burst } = self else {
            return (0..plan.all_connections()).map(|_| self.connect(plan)).collect();
        };
        let terms = terms(*address, plan);
        let mut connections = Vec::new();
        while connections.len() < plan.all_connections() {
            let account = burst.as_ref().filter(|_| connections.len() >= plan.connections).unwrap_or(account);
            let (first, session) = handshake::connect(terms, account)?;
            connections.push(first);
            for number in 1..plan.channels {
                if connections.len() < plan.all_connections() {
                    connections.push(handshake::bind(terms, account, &session, number)?);
                }
            }
        }
        Ok(connections)
    }
}

fn terms(address: SocketAddr, plan: &Plan) -> Terms {
    Terms { address, credits: plan.credits(), io_bytes: plan.largest_io() }
}
