//! A connection that has logged on, opened a file and read from it.

use anyhow::{Result, ensure};

use crate::load::connection::Connection;
use crate::load::plan::{Plan, SMALL_READ_BYTES};
use crate::load::request::Opening;
use crate::load::target::Target;

/// Establishes one. Its file stays open.
pub(crate) fn connect(target: &Target, plan: &Plan) -> Result<Connection> {
    let mut connection = target.connect(plan)?;
    let file_id = connection.create(&plan.file_name(0), 0, Opening::READ)?;
    let got = connection.read(file_id, 0, SMALL_READ_BYTES as u32)?;
    ensure!(got == SMALL_READ_BYTES, "a READ of {SMALL_READ_BYTES} B gave {got}");
    Ok(connection)
}
