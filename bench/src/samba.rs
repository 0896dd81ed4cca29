//! Samba as the reference, configured as a careful administrator would for this load.

use std::fmt::Write;
use std::fs;

use anyhow::Result;
use forebay_e2e::cache::Cache;
use forebay_e2e::native;

use crate::place::{Place, SHARE, Server, USER, free_port};

/// Creates the account in this run's own copy of the root and in its own account database, then executes smbd.
const SCRIPT: &str = r#"
home=/scratch/$1 user=$2
printf '%s:x:4242:4242::/:/usr/sbin/nologin\n' "$user" >> /etc/passwd
{ cat "$home/password"; cat "$home/password"; } | smbpasswd -c "$home/smb.conf" -s -a "$user" > /dev/null
exec smbd --foreground --no-process-group --debug-stdout --configfile="$home/smb.conf"
"#;

/// Starts a Samba server. Returns it with its port.
pub(crate) fn start(cache: &Cache, place: &Place, name: &'static str, extra: &str) -> Result<(Server, u16)> {
    let port = free_port()?;
    let home = place.path().join(name);
    for folder in ["private", "lock", "state", "cache", "pid", "ncalrpc"] {
        fs::create_dir_all(home.join(folder))?;
    }
    place.write_secret(&format!("{name}/password"), &format!("{}\n", place.password()))?;
    fs::write(home.join("smb.conf"), configuration(name, port, place.share_in_root(), extra)?)?;
    let argv = ["sh", "-euc", SCRIPT, "start-smbd", name, USER].map(str::to_owned);
    let command = native::command(cache, place.path(), &argv)?;
    let mut server = Server::start(place, name, &command, false)?;
    server.wait_for_port(port)?;
    Ok((server, port))
}

/// Asynchronous reads in a thread pool and TCP_NODELAY are Samba's defaults. Signing is offered and not required, so no
/// request is signed here. Apart from paths and names, the settings are those that its manual recommends for large transfers
/// and large directories: names are case-sensitive, as in Forebay, because smbd otherwise reads the whole directory for each
/// name that does not exist.
fn configuration(name: &str, port: u16, share: &str, extra: &str) -> Result<String> {
    let mut text = String::from("[global]\n");
    for folder in ["private", "lock", "state", "cache", "pid"] {
        let option =
            if folder == "private" { "private dir".to_owned() } else { format!("{folder} directory") };
        writeln!(text, "{option} = /scratch/{name}/{folder}")?;
    }
    writeln!(
        text,
        "ncalrpc dir = /scratch/{name}/ncalrpc
passdb backend = tdbsam:/scratch/{name}/private/passdb.tdb
log level = 0
server role = standalone server
smb ports = {port}
interfaces = lo
bind interfaces only = yes
disable netbios = yes
disable spoolss = yes
load printers = no
server min protocol = SMB3_11
smb2 max read = 8388608
smb2 max credits = 8192
{extra}
[{SHARE}]
path = {share}
read only = no
case sensitive = yes
preserve case = yes
short preserve case = yes"
    )?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_samba_instances_share_only_the_exported_files() {
        let a = configuration("samba", 4001, "/scratch/pool", "").expect("text");
        let b = configuration("samba-sendfile", 4002, "/scratch/pool", "use sendfile = yes\n").expect("text");
        let places = |text: &str| -> Vec<String> {
            text.lines()
                .filter(|line| line.contains("/scratch/") && !line.starts_with("path"))
                .map(str::to_owned)
                .collect()
        };
        assert_eq!(places(&a).len(), 7);
        assert!(places(&a).iter().all(|place| !places(&b).contains(place)));
        assert!(b.contains("\nuse sendfile = yes\n") && !a.contains("sendfile"));
    }
}
