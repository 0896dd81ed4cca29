//! NodeStageVolume and NodeUnstageVolume: one SMB mount per volume and node.

use std::collections::HashMap;
use std::net::{IpAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use forebay_proto::csi::{
    NodeStageVolumeRequest, NodeStageVolumeResponse, NodeUnstageVolumeRequest, NodeUnstageVolumeResponse,
};
use rustix::io::Errno;
use tonic::Code;
use tracing::warn;

use super::claims::Claim;
use super::group::{self, Place};
use super::measure::Answer;
use super::unmount::Directory;
use super::{NodeService, check_path, check_volume_id, io_error, make_target, mounts};
use crate::address::ServerAddress;
use crate::agent::addresses;
use crate::capability::Capability;
use crate::context::{Location, VolumeContext};
use crate::deadline::run_until;
use crate::error::Error;
use crate::handle::InstanceName;
use crate::limits::CLIENT_DEADLINE;
use crate::mount::{self, MountError, Setting, Step};
use crate::mountinfo::{MountEntry, resolve};
use crate::names::VolumeId;
use crate::options::MountOptions;
use crate::secrets::{Credentials, Given};
use crate::transport::{self, Choice, Client, Over, Served, Transport};

/// The kernel's name for its SMB client.
const FS_TYPE: &str = "cifs";

/// Claim name for reads of the node's hardware; no volume has this name.
const LOOK: &str = "(node)";

impl NodeService {
    /// CSI NodeStageVolume.
    pub(super) async fn stage(
        &self,
        mut request: NodeStageVolumeRequest,
    ) -> Result<NodeStageVolumeResponse, Error> {
        let given = Given::take(&mut request.secrets);
        check_volume_id(&request.volume_id)?;
        let staging = check_path("staging_target_path", &request.staging_target_path)?;
        let capability = Capability::parse(request.volume_capability.as_ref())?;
        self.mount_for(request.volume_id, staging, &capability, &request.volume_context, given?).await?;
        Ok(NodeStageVolumeResponse {})
    }

    /// Mounts the volume at its staging path, or beside it for another group, unless it is already mounted.
    pub(super) async fn mount_for(
        &self,
        volume_id: String,
        staging: PathBuf,
        capability: &Capability,
        context: &HashMap<String, String>,
        given: Given,
    ) -> Result<(), Error> {
        let context = VolumeContext::parse(context)?;
        let credentials = given.for_volume(&context.share);
        let flags = &capability.mount.mount_flags;
        let options = MountOptions::build(&context.dialect, context.protection, capability.group()?, flags)?;
        let wanted = context.transport.with(&options)?;
        let (servers, is_instance) = match &context.location {
            Location::Servers(servers) => (Ok((servers.clone(), Served::Unknown)), false),
            Location::Instance { namespace, name } => (self.locate(namespace, name).await, true),
        };
        let target = match servers {
            Ok((servers, served)) => {
                self.choose(wanted, &options, &served).await.map(|choice| (servers, choice))
            }
            Err(error) => Err(error),
        };

        let claim = self.claims.volume(&volume_id)?;
        let is_required = wanted == Transport::Rdma;
        let is_signed = self.reported.is_signed(&volume_id);
        let volume = Staging {
            target,
            is_instance,
            is_required,
            is_signed,
            share: context.share,
            credentials,
            options,
        };
        let (claim, (volume, found)) = under(claim, "look", self.deadlines.mount, move || {
            let found = volume.look(&staging)?;
            Ok((volume, found))
        })
        .await?;
        let (place, claim) = match found {
            Found::Nothing(place) => (place, claim),
            Found::Staged => return Ok(()),
            Found::Elsewhere { place, mount_id, address } => {
                if self.answers(&place, mount_id).await? {
                    return Ok(());
                }
                warn!(
                    volume_id,
                    path = %place.display(),
                    %address,
                    "the staged mount is silent, and its server has another address now: mounting it again"
                );
                let claim = self.discard(&place, claim).await?;
                (place, claim)
            }
        };
        let passwords = self.passwords.clone();
        self.mount_and_tell(&volume_id, claim, move || {
            let is_signed = volume.options.has("sign");
            let credentials = volume.credentials.clone();
            let choice = volume.mount_at(&place)?;
            passwords.note(&place, credentials.expose_password());
            Ok((choice, is_signed))
        })
        .await
    }

    /// Mounts, and records how. The thread does both: the call may have given up by then.
    pub(super) async fn mount_and_tell(
        &self,
        volume_id: &str,
        claim: Claim,
        mount: impl FnOnce() -> Result<(Choice, bool), Error> + Send + 'static,
    ) -> Result<(), Error> {
        let (reported, volume_id) = (self.reported.clone(), volume_id.to_owned());
        let mounting = under(claim, "mount", self.deadlines.mount, move || {
            let (choice, is_signed) = mount()?;
            reported.mounted(&volume_id, choice, is_signed);
            Ok(())
        });
        mounting.await.map(drop)
    }

    /// Whether the mount at the path responds. A response after the deadline does not count.
    pub(super) async fn answers(&self, path: &Path, mount_id: u64) -> Result<bool, Error> {
        let answer = self.measuring.measure(path, mount_id, self.deadlines.stats).await?;
        Ok(matches!(answer, Answer::Measured(Ok(_))))
    }

    /// Detaches a staged mount that is no longer usable. Pods that use it keep it until they end.
    pub(super) async fn discard(&self, path: &Path, claim: Claim) -> Result<Claim, Error> {
        let _hold = self.measuring.hold(path);
        self.detach(path.to_owned(), Directory::Keep, claim).await
    }

    /// The current addresses of the volume's server; `None` if they are unknown.
    pub(super) async fn present_addresses(&self, context: &VolumeContext) -> Option<Vec<IpAddr>> {
        let servers = match &context.location {
            Location::Servers(servers) => servers.clone(),
            Location::Instance { namespace, name } => self.locate(namespace, name).await.ok()?.0,
        };
        run_until("resolve", CLIENT_DEADLINE, move || present(&servers)).await.ok().flatten()
    }

    /// The current address of the instance.
    pub(super) async fn locate(
        &self,
        namespace: &str,
        name: &InstanceName,
    ) -> Result<(Vec<ServerAddress>, Served), Error> {
        let Some(clusters) = &self.clusters else {
            let message = format!("instance {name} cannot be looked up: this node runs without --kubernetes");
            return Err(Error::Refused(message));
        };
        let own = clusters.kubernetes().namespace();
        if namespace != own {
            let message = format!("instance {name} is in namespace {namespace}, this driver works in {own}");
            return Err(Error::Refused(message));
        }
        let (address, served) = clusters.address_of(name).await?;
        Ok((vec![address], served))
    }

    /// Chooses the transport from the request and the capabilities of both ends.
    async fn choose(
        &self,
        wanted: Transport,
        options: &MountOptions,
        served: &Served,
    ) -> Result<Choice, Error> {
        if let Some(choice) = transport::by_server(wanted, options, served)? {
            return Ok(choice);
        }
        let host = Arc::clone(&self.host);
        // One read at a time: a driver that hangs must not block a thread for every mount. Calls that arrive while a read hangs
        // fail immediately.
        let turn = self.turn.lock().await;
        let looked = match self.looking.claim(LOOK) {
            Ok(claim) => {
                run_until("inventory", CLIENT_DEADLINE, move || {
                    let _claim = claim;
                    Ok::<_, std::io::Error>(Client::of(&host.read(), &addresses()?))
                })
                .await
            }
            Err(error) => Err(error),
        };
        drop(turn);
        match looked {
            Ok(Ok(client)) => transport::by_client(wanted, Ok(&client)),
            Ok(Err(error)) => {
                let why = format!("the node's addresses cannot be read: {error}");
                transport::by_client(wanted, Err(&why))
            }
            Err(_) => transport::by_client(wanted, Err("the node's RDMA devices do not answer")),
        }
    }

    /// CSI NodeUnstageVolume. Keeps the staging directory: it belongs to the orchestrator.
    pub(super) async fn unstage(
        &self,
        request: NodeUnstageVolumeRequest,
    ) -> Result<NodeUnstageVolumeResponse, Error> {
        check_volume_id(&request.volume_id)?;
        let staging = check_path("staging_target_path", &request.staging_target_path)?;
        let volume_id = request.volume_id;
        let claim = self.claims.volume(&volume_id)?;
        let path = staging.clone();
        let (mut claim, beside) =
            under(claim, "look", self.deadlines.unmount, move || group::beside(&path)).await?;
        for path in beside {
            claim = self.unmount(&volume_id, path, Directory::Remove, claim).await?;
        }
        let _claim = self.unmount(&volume_id, staging.clone(), Directory::Keep, claim).await?;
        self.reported.unmounted(&volume_id);
        self.passwords.forget(&staging);
        Ok(NodeUnstageVolumeResponse {})
    }
}

/// Runs a step of a call on a dedicated thread under the call's claim, which a thread that hangs keeps.
pub(super) async fn under<T: Send + 'static>(
    claim: Claim,
    what: &'static str,
    deadline: Duration,
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<(Claim, T), Error> {
    let (lent, permit) = claim.lend();
    let result = run_until(what, deadline, move || {
        let _permit = permit;
        work()
    });
    let value = result.await??;
    Ok((lent.take_back(), value))
}

/// The current mount at the volume's place.
enum Found {
    /// Nothing is mounted; mount the volume here.
    Nothing(PathBuf),
    /// The volume is mounted.
    Staged,
    /// The volume is mounted, but from an address that its server no longer has.
    Elsewhere { place: PathBuf, mount_id: u64, address: IpAddr },
}

/// All data that a mount requires.
struct Staging {
    /// An existing mount requires no address, so an unknown address is an error only if the volume must be mounted.
    target: Result<(Vec<ServerAddress>, Choice), Error>,
    /// The address does not identify the volume: it may have been different at mount time.
    is_instance: bool,
    /// Must be mounted over RDMA.
    is_required: bool,
    /// Whether the existing mount was created with `sign`, if known: the kernel does not show it.
    is_signed: Option<bool>,
    share: VolumeId,
    credentials: Credentials,
    options: MountOptions,
}

impl Staging {
    /// Runs before anything accesses the path, which may be a mount that hangs. Can block, because it resolves names.
    fn look(&self, staging: &Path) -> Result<Found, Error> {
        let table = mounts()?;
        if let Some(resolved) = resolve(staging).map_err(|e| io_error("resolve", staging, e))?
            && let Some(entry) = table.at(&resolved)
        {
            self.check_staged(staging, entry)?;
        }
        let (place, entry) = match group::find(&table, staging, self.options.gid())? {
            Place::Free(place) => return Ok(Found::Nothing(place)),
            Place::Mounted { path, entry } => (path, entry),
        };
        self.check_staged(&place, &entry)?;
        let present = self.target.as_ref().ok().and_then(|(servers, _)| present(servers));
        match (entry.address(), present) {
            (Some(address), Some(present)) if !present.contains(&address) => {
                Ok(Found::Elsewhere { place, mount_id: entry.id, address })
            }
            _ => Ok(Found::Staged),
        }
    }

    /// Mounts the volume on a dedicated thread, because every step can block. Returns how it was mounted.
    fn mount_at(mut self, staging: &Path) -> Result<Choice, Error> {
        let (servers, choice) = std::mem::replace(&mut self.target, Err(Error::NoAddress))?;
        let target = make_target(staging)?;
        if choice.over != Over::Tcp {
            match self.mount_over(&servers, true, &target) {
                Err(error) if choice.over == Over::RdmaOrTcp => {
                    warn!(share = %self.share, error = error.to_string(), "cannot mount over RDMA, taking TCP");
                    self.mount_over(&servers, false, &target)?;
                    return Ok(Choice::short_of(format!("mounting over RDMA failed: {error}")));
                }
                result => return result.map(|()| choice),
            }
        }
        self.mount_over(&servers, false, &target)?;
        Ok(choice)
    }

    /// Mounts from the first address that responds.
    fn mount_over(&self, servers: &[ServerAddress], rdma: bool, target: &Path) -> Result<(), Error> {
        let mut last = None;
        for server in servers {
            for ip in addresses_of(server)? {
                match self.mount(server, ip, rdma, target) {
                    Err(error) if error.is_unreachable() => {
                        warn!(server = %server, %ip, error = error.to_string(), "this address does not answer");
                        last = Some(error);
                    }
                    result => return result.map_err(Error::from),
                }
            }
        }
        Err(last.map_or(Error::NoAddress, Error::from))
    }

    fn mount(&self, server: &ServerAddress, ip: IpAddr, rdma: bool, target: &Path) -> Result<(), MountError> {
        try_passwords(self.credentials.expose_passwords(), |first, second| {
            let source = self.source(server);
            let ip = ip.to_string();
            let port = server.port.to_string();
            let mut settings = vec![
                Setting::Value("source", &source),
                Setting::Value("ip", &ip),
                Setting::Value("port", &port),
                Setting::Value("username", &self.credentials.username),
                Setting::Secret("password", first),
            ];
            // Used for a reconnection after the first password has become invalid.
            settings.extend(second.map(|second| Setting::Secret("password2", second)));
            settings.extend(self.options.settings());
            settings.extend(rdma.then_some(Setting::Flag("rdma")));
            mount::mount(FS_TYPE, &source, &settings, self.options.attributes, target)
        })
    }

    /// The source as shown in the kernel's mount table.
    fn source(&self, server: &ServerAddress) -> String {
        format!("//{}/{}", server.host, self.share)
    }

    /// CSI: succeeds if the same volume is already staged, and fails if something else is mounted.
    fn check_staged(&self, staging: &Path, entry: &MountEntry) -> Result<(), Error> {
        let taken = |found: String| Err(Error::PathTaken { path: staging.display().to_string(), found });
        let source = entry.source.to_str();
        let same = match (self.is_instance, &self.target) {
            (true, _) => entry.share() == Some(self.share.as_str()),
            (false, Ok((servers, _))) => servers.iter().any(|s| source == Some(&*self.source(s))),
            (false, Err(_)) => false,
        };
        if !entry.is_smb() || !same {
            return taken(entry.describe());
        }
        if entry.super_option("username").is_some_and(|name| name != self.credentials.username) {
            return taken("the volume is mounted with another username".into());
        }
        if self.options.is_sealed() && !entry.has_super_flag("seal") {
            return taken("the volume is mounted without seal".into());
        }
        if self.is_required && !entry.has_super_flag("rdma") {
            return taken("the volume is mounted without rdma".into());
        }
        if self.is_signed.is_some_and(|is_signed| is_signed != self.options.has("sign")) {
            return taken("the volume is mounted with another sign".into());
        }
        // The kernel shows `soft` or `hard`, and `nosoft` and `nohard` as their opposites.
        if self.options.is_hard() && entry.has_super_flag("soft")
            || !self.options.is_hard() && entry.has_super_flag("hard")
        {
            return taken("the volume is mounted with another soft or hard".into());
        }
        let read_only = rustix::mount::MountAttrFlags::MOUNT_ATTR_RDONLY;
        if self.options.attributes.contains(read_only) != entry.is_read_only() {
            return taken("the volume is mounted with another ro or rw".into());
        }
        Ok(())
    }
}

/// Mounts with the currently valid passwords; during a rotation there are two. Uses the first, and passes the second for later
/// if the kernel supports `password2` (Linux 6.9). Uses the second if the first is not valid yet, or no longer valid.
fn try_passwords(
    (first, second): (&str, Option<&str>),
    mount: impl Fn(&str, Option<&str>) -> Result<(), MountError>,
) -> Result<(), MountError> {
    let Some(second) = second else { return mount(first, None) };
    let refused = |error: &MountError| error.code() == Code::Unauthenticated;
    match mount(first, Some(second)) {
        Err(error) if error.step == Step::Option("password2".to_owned()) => match mount(first, None) {
            Err(error) if refused(&error) => mount(second, None),
            result => result,
        },
        Err(error) if refused(&error) => mount(second, Some(first)),
        result => result,
    }
}

/// The addresses of servers; `None` if none is known.
fn present(servers: &[ServerAddress]) -> Option<Vec<IpAddr>> {
    let found: Vec<IpAddr> =
        servers.iter().filter_map(|server| addresses_of(server).ok()).flatten().collect();
    (!found.is_empty()).then_some(found)
}

/// Resolves a server's name, which the kernel does not do.
fn addresses_of(server: &ServerAddress) -> Result<Vec<IpAddr>, Error> {
    if let Ok(ip) = server.host.parse() {
        return Ok(vec![ip]);
    }
    match (server.host.as_str(), server.port).to_socket_addrs() {
        Ok(found) => {
            let mut ips = Vec::new();
            for ip in found.map(|a| a.ip()) {
                if !ips.contains(&ip) {
                    ips.push(ip);
                }
            }
            Ok(ips)
        }
        // An unreachable name server is treated like an unreachable server.
        Err(error) => Err(Error::Mount(MountError {
            what: format!("//{}", server.host),
            step: Step::Create,
            errno: Errno::HOSTUNREACH,
            messages: vec![format!("the name cannot be resolved: {error}")],
        })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::DIALECT_DEFAULT;

    fn staging(server: &str, protection: &str, flags: &[&str]) -> Staging {
        let context = HashMap::from([
            ("server".to_owned(), server.to_owned()),
            ("share".to_owned(), "pvc-1".to_owned()),
            ("protection".to_owned(), protection.to_owned()),
        ]);
        let context = VolumeContext::parse(&context).expect("a context");
        let flags: Vec<String> = flags.iter().map(|f| (*f).to_owned()).collect();
        let options =
            MountOptions::build(DIALECT_DEFAULT, context.protection, None, &flags).expect("options");
        let mut secrets = HashMap::from([
            ("username".to_owned(), "u1".to_owned()),
            ("password".to_owned(), "12345678".to_owned()),
        ]);
        let credentials = Given::take(&mut secrets).expect("credentials").for_volume(&context.share);
        let Location::Servers(servers) = context.location else { unreachable!("it has a server") };
        Staging {
            target: Ok((servers, Choice::tcp())),
            is_instance: false,
            is_required: false,
            is_signed: None,
            share: context.share,
            credentials,
            options,
        }
    }

    fn entry(fs_type: &str, source: &str, options: &str, super_options: &str) -> MountEntry {
        MountEntry {
            id: 1,
            device: "0:44".into(),
            root: "/".into(),
            mount_point: "/s".into(),
            options: options.into(),
            fs_type: fs_type.into(),
            source: source.into(),
            super_options: super_options.into(),
        }
    }

    #[test]
    fn matching_staged_mount_is_accepted_and_others_are_refused() {
        let plain = staging("10.0.0.1,h:1445", "optional", &[]);
        let check =
            |volume: &Staging, entry: MountEntry| volume.check_staged(Path::new("/s"), &entry).is_ok();
        assert!(check(&plain, entry("cifs", "//10.0.0.1/pvc-1", "rw", "rw,username=u1")));
        assert!(check(&plain, entry("smb3", "//h/pvc-1", "rw", "rw")));
        assert!(!check(&plain, entry("tmpfs", "//h/pvc-1", "rw", "rw")));
        assert!(!check(&plain, entry("cifs", "//h/pvc-2", "rw", "rw")));
        assert!(!check(&plain, entry("cifs", "//other/pvc-1", "rw", "rw")));
        assert!(!check(&plain, entry("cifs", "//h/pvc-1", "rw", "rw,username=u2")));
        assert!(!check(&plain, entry("cifs", "//h/pvc-1", "ro", "rw,username=u1")));
        let mut required = staging("h", "optional", &[]);
        required.is_required = true;
        assert!(check(&required, entry("cifs", "//h/pvc-1", "rw", "rw,addr=10.0.0.1,rdma,file_mode=0777")));
        assert!(!check(&required, entry("cifs", "//h/pvc-1", "rw", "rw,addr=10.0.0.1")));
        assert!(check(&plain, entry("cifs", "//h/pvc-1", "rw", "rw,rdma")), "auto takes either");
        let sealed = staging("h", "seal", &["ro"]);
        assert!(sealed.options.is_sealed());
        assert!(check(&sealed, entry("cifs", "//h/pvc-1", "ro", "rw,seal")));
        assert!(!check(&sealed, entry("cifs", "//h/pvc-1", "ro", "rw")));
        assert!(check(&plain, entry("cifs", "//h/pvc-1", "rw", "rw,hard")));
        assert!(!check(&plain, entry("cifs", "//h/pvc-1", "rw", "rw,soft")));
        let soft = staging("h", "optional", &["nohard"]);
        assert!(check(&soft, entry("cifs", "//h/pvc-1", "rw", "rw,soft")));
        assert!(!check(&soft, entry("cifs", "//h/pvc-1", "rw", "rw,hard")));
        let mut signed = staging("h", "sign", &[]);
        for (known, fits) in [(None, true), (Some(true), true), (Some(false), false)] {
            signed.is_signed = known;
            assert_eq!(check(&signed, entry("cifs", "//h/pvc-1", "rw", "rw")), fits, "{known:?}");
        }
    }

    #[test]
    fn second_password_is_tried_if_the_first_is_refused() {
        let refused = |step: Step, errno| MountError { what: "v".into(), step, errno, messages: vec![] };
        let tried = |knows_second: bool, good: &'static str| {
            let tries = std::cell::RefCell::new(Vec::new());
            let result = try_passwords(("new", Some("old")), |first, second| {
                tries.borrow_mut().push(format!("{first}+{}", second.unwrap_or("-")));
                match second {
                    Some(_) if !knows_second => Err(refused(Step::Option("password2".into()), Errno::INVAL)),
                    _ if first == good => Ok(()),
                    _ => Err(refused(Step::Create, Errno::ACCESS)),
                }
            });
            (result.is_ok(), tries.into_inner().join(" "))
        };
        assert_eq!(tried(true, "new"), (true, "new+old".to_owned()));
        assert_eq!(tried(true, "old"), (true, "new+old old+new".to_owned()));
        assert_eq!(tried(true, "other"), (false, "new+old old+new".to_owned()));
        assert_eq!(tried(false, "new"), (true, "new+old new+-".to_owned()));
        assert_eq!(tried(false, "old"), (true, "new+old new+- old+-".to_owned()));
        let away = try_passwords(("new", Some("old")), |_, _| Err(refused(Step::Create, Errno::HOSTDOWN)));
        assert!(away.is_err_and(|error| error.is_unreachable()), "no second try at an unreachable server");
    }

    #[test]
    fn staged_instance_volume_is_recognised_at_any_address() {
        let mut volume = staging("h", "optional", &[]);
        volume.is_instance = true;
        volume.target = Err(Error::NotNow("the instance has no address yet".into()));
        let check = |source: &str| {
            volume.check_staged(Path::new("/s"), &entry("cifs", source, "rw", "rw,username=u1")).is_ok()
        };
        assert!(check("//10.0.0.1/pvc-1"));
        assert!(check("//10.0.0.2/pvc-1"));
        for other in ["//10.0.0.1/pvc-2", "//10.0.0.1/x/pvc-1", "/pvc-1", "pvc-1"] {
            assert!(!check(other), "{other}");
        }
    }

    #[test]
    fn ip_addresses_are_used_directly_and_names_are_resolved() {
        let ips = |text: &str| addresses_of(&text.parse().expect("an address"));
        assert_eq!(ips("10.1.2.3").expect("itself"), [IpAddr::from([10, 1, 2, 3])]);
        assert!(ips("localhost").expect("in every hosts file").iter().all(IpAddr::is_loopback));
        // RFC 6761 6.4: never resolves.
        let status = tonic::Status::from(ips("forebay.invalid").expect_err("no such name"));
        assert_eq!(status.code(), Code::Unavailable, "{status}");
    }
}
