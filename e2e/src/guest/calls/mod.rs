//! Functions of the guest binary that scenarios call by name. The bodies of the tests run inside the guest as one program,
//! because starting a program under emulation costs tens of milliseconds.

pub mod data;
pub mod direct;
pub mod grpc;
pub mod inventory;
pub mod locks;
pub mod mounting;
pub mod nvmeof;
pub mod nvmet;
pub mod posix;
pub mod space;
pub mod writer;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Runs the function of this name: JSON in, JSON out.
pub fn dispatch(function: &str, arguments: &[u8]) -> Result<Vec<u8>> {
    match function {
        "write-shards" => call(arguments, data::write_shards),
        "verify-sums" => call(arguments, data::verify_sums),
        "make-tree" => call(arguments, data::make_tree),
        "digest-tree" => call(arguments, data::digest_tree),
        "mount" => call(arguments, mounting::mount),
        "unmount" => call(arguments, mounting::unmount),
        "smb-direct-verify" => call(arguments, direct::verify),
        "smb-direct-verify-sealed" => call(arguments, direct::verify_sealed),
        "smb-direct-fault" => call(arguments, direct::commit),
        "nvmet-offer" => call(arguments, nvmet::offer),
        "nvmet-withdraw" => call(arguments, nvmet::withdraw),
        "nvmeof-host" => call(arguments, nvmeof::host_nqn),
        "nvmeof-connect" => call(arguments, nvmeof::connect),
        "nvmeof-disconnect" => call(arguments, nvmeof::disconnect),
        "nvmeof-discover" => call(arguments, nvmeof::discover),
        "nvmeof-watch" => call(arguments, nvmeof::watch),
        "nvmeof-acquire" => call(arguments, nvmeof::acquire),
        "nvmeof-check" => call(arguments, nvmeof::check),
        "nvmeof-release" => call(arguments, nvmeof::release),
        "nvmeof-write" => call(arguments, nvmeof::write),
        "nvmeof-writers" => call(arguments, nvmeof::writers),
        "posix" => call(arguments, posix::all),
        "fill" => call(arguments, space::fill),
        "inventory" => call(arguments, inventory::inventory),
        "space" => call(arguments, space::space),
        "verify-records" => call(arguments, writer::verify),
        "csi" => call(arguments, grpc::csi),
        "admin" => call(arguments, grpc::admin),
        other => bail!("no function {other}"),
    }
}

fn call<A: DeserializeOwned, R: Serialize>(
    arguments: &[u8],
    function: fn(A) -> Result<R>,
) -> Result<Vec<u8>> {
    let arguments = serde_json::from_slice(arguments).context("arguments")?;
    Ok(serde_json::to_vec(&function(arguments)?)?)
}
