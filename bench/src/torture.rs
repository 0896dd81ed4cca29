//! The client: smbtorture's `smb2.bench.read`, from the lab's root file system.

use std::process::Stdio;

use anyhow::{Context, Result, bail};
use forebay_e2e::cache::Cache;
use forebay_e2e::native;

use crate::place::{Place, SHARE};

/// The parameters of a load.
#[derive(Debug, Clone, serde::Serialize)]
pub(crate) struct Load {
    pub(crate) io_bytes: u64,
    pub(crate) connections: u32,
    pub(crate) depth: u32,
    pub(crate) seconds: u32,
}

/// The rate that the client reached.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rate {
    pub(crate) bytes_per_second: f64,
    pub(crate) bytes: u64,
}

/// Runs it against the server on this port.
pub(crate) fn read(cache: &Cache, place: &Place, port: u16, load: &Load) -> Result<Rate> {
    let argv = [
        "smbtorture".to_owned(),
        format!("//127.0.0.1/{SHARE}"),
        format!("--smb-ports={port}"),
        "--authentication-file=/scratch/credentials".to_owned(),
        "--option=clientminprotocol=SMB3_11".to_owned(),
        "--option=clientmaxprotocol=SMB3_11".to_owned(),
        "--option=torture:progress=no".to_owned(),
        format!("--option=torture:nprocs={}", load.connections),
        format!("--option=torture:qdepth={}", load.depth),
        format!("--option=torture:io_size={}", load.io_bytes),
        format!("--option=torture:timelimit={}", load.seconds),
        "smb2.bench.read".to_owned(),
    ];
    let output = native::command(cache, place.path(), &argv)?
        .stdin(Stdio::null())
        .output()
        .context("start smbtorture")?;
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    if !output.status.success() {
        bail!("smbtorture ended with {}:\n{}", output.status, said.trim_end());
    }
    let reads_per_second = reads_per_second(&said)
        .with_context(|| format!("smbtorture reported no rate:\n{}", said.trim_end()))?;
    Ok(Rate {
        bytes_per_second: (reads_per_second * load.io_bytes) as f64,
        bytes: reads_per_second * load.io_bytes * u64::from(load.seconds),
    })
}

/// Parses its last line, which contains the mean over the whole run. Versions differ in the separator and in digit grouping:
/// `read[num/s=1089,bytes/s=…]` in 4.22, `read[num/s=1,089;bytes/s=…]` later.
fn reads_per_second(said: &str) -> Option<u64> {
    let (_, rest) = said.rsplit_once("read[num/s=")?;
    let (number, _) = rest.split_once("bytes/s=")?;
    let digits: String = number.chars().filter(char::is_ascii_digit).collect();
    digits.parse().ok().filter(|reads| *reads > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_is_parsed_from_the_last_line_in_either_format() {
        let old = "Running for 2 seconds\n\
                   1.00 second: read[num/s=9,bytes/s=9437184,avslat=0.1,minlat=0.1,maxlat=0.2]      \r\
                   2.00 second: read[num/s=2051,bytes/s=2150629376,avslat=0.007,minlat=0.001,maxlat=0.02]\n\
                   2.00 seconds\n";
        assert_eq!(reads_per_second(old), Some(2051));
        let new =
            "2.00 second: read[num/s=2,051;bytes/s=2,150,629,376;avslat=0.007;minlat=0.001;maxlat=0.02]\n";
        assert_eq!(reads_per_second(new), Some(2051));
    }

    #[test]
    fn run_without_reads_has_no_result() {
        assert_eq!(reads_per_second("2.00 second: read[num/s=0,bytes/s=0,"), None);
        assert_eq!(reads_per_second("failure: read"), None);
    }
}
