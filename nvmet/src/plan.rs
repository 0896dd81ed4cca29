//! Computes the changes from nvmet's current state to the required one: a pure comparison.
//!
//! Objects that this target does not own are never changed. Its own objects are changed so that remaining hosts notice nothing:
//! hosts and namespaces are added and removed individually, and a subsystem or a port is removed only if the configuration no
//! longer has it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::config::{self, Config, Source, Transport};
use crate::limits::FILE_BYTES_MIN;
use crate::observed::{self, Observed};
use crate::owner::{self, Owner};
use crate::source::{Cache, Ground, Held, Key, There};
use crate::step::Step;

/// The required state.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) owner: Owner,
    pub(crate) ports: Vec<Port>,
    pub(crate) subsystems: Vec<config::Subsystem>,
    /// Names in the configuration: empty objects with one of these names are ours to remove.
    pub(crate) known: BTreeSet<String>,
}

/// A port with its current address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Port {
    pub(crate) config: config::Port,
    /// The address, or why the interface has none.
    pub(crate) address: Result<IpAddr, String>,
}

impl Wanted {
    /// The state that the configuration requires.
    pub(crate) fn of(config: &Config, ports: Vec<Port>) -> Self {
        let owner = Owner::of(&config.name);
        Self { owner, ports, subsystems: config.subsystems.clone(), known: names(config) }
    }

    /// An empty state, to remove what the configuration has required.
    pub(crate) fn nothing(config: &Config) -> Self {
        let owner = Owner::of(&config.name);
        Self { owner, ports: Vec::new(), subsystems: Vec::new(), known: names(config) }
    }
}

fn names(config: &Config) -> BTreeSet<String> {
    let names = config.subsystems.iter().flat_map(|subsystem| {
        subsystem.hosts.iter().chain([&subsystem.nqn]).map(|name| name.as_str().to_owned())
    });
    names.collect()
}

/// The subject of a problem or a task.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Subject {
    Subsystem(String),
    Namespace(Key),
    /// A port, as written in the configuration.
    Port(String),
    /// A port in the kernel that must be removed.
    PortNumber(u16),
    Host(String),
}

impl std::fmt::Display for Subject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Subsystem(nqn) => write!(f, "subsystem {nqn}"),
            Self::Namespace((nqn, id)) => write!(f, "namespace {id} of {nqn}"),
            Self::Port(port) => write!(f, "port {port}"),
            Self::PortNumber(id) => write!(f, "port {id}"),
            Self::Host(nqn) => write!(f, "host {nqn}"),
        }
    }
}

/// Why something is not in the required state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Problem {
    pub(crate) subject: Subject,
    pub(crate) why: String,
}

/// Steps that must run in this order. The first failure ends the task, not the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Task {
    pub(crate) subject: Subject,
    /// Subject on which it depends.
    pub(crate) needs: Option<Subject>,
    /// For the log.
    pub(crate) what: &'static str,
    pub(crate) steps: Vec<Step>,
    /// What has been reported to hosts when it completes.
    pub(crate) tells: Option<Tells>,
}

/// The namespace size in bytes that is reported to hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tells {
    /// The namespace is offered again, with its current backing device or file.
    Offered(u64),
    /// The namespace was already offered.
    Size(u64),
}

/// The changes to make, and the problems that prevent changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) tasks: Vec<Task>,
    pub(crate) problems: Vec<Problem>,
}

impl Plan {
    fn task(&mut self, subject: Subject, what: &'static str, steps: Vec<Step>) {
        self.tasks.push(Task { subject, needs: None, what, steps, tells: None });
    }

    fn problem(&mut self, subject: Subject, why: impl Into<String>) {
        self.problems.push(Problem { subject, why: why.into() });
    }
}

/// Compares the states.
pub(crate) fn plan(wanted: &Wanted, observed: &Observed, grounds: &BTreeMap<Key, Ground>) -> Plan {
    let mut plan = Plan::default();
    remove_subsystems(wanted, observed, &mut plan);
    let ports = match_ports(wanted, observed, &mut plan);
    remove_hosts(wanted, observed, &mut plan);
    let mut offered = Vec::new();
    for subsystem in &wanted.subsystems {
        if make_subsystem(wanted, subsystem, observed, grounds, &mut plan) {
            offered.push(subsystem.nqn.as_str());
        }
    }
    for (port, id) in ports {
        make_port(port, id, &offered, wanted, observed, &mut plan);
    }
    plan
}

/// Removes our subsystems that are not required.
fn remove_subsystems(wanted: &Wanted, observed: &Observed, plan: &mut Plan) {
    for (nqn, found) in &observed.subsystems {
        if wanted.subsystems.iter().any(|subsystem| subsystem.nqn.as_str() == nqn) {
            continue;
        }
        let left_behind =
            (wanted.known.contains(nqn) || owner::is_our_name(nqn)) && owner::is_empty(nqn, found, observed);
        if !wanted.owner.owns_subsystem(found) && !left_behind {
            continue;
        }
        let subject = Subject::Subsystem(nqn.clone());
        let mut steps = Vec::new();
        let mut foreign = None;
        for (id, port) in observed.carriers(nqn) {
            if !wanted.owner.owns_port(id, port) {
                foreign = Some(id);
            }
            let links = port.subsystems.iter().filter(|(_, to)| *to == nqn);
            steps.extend(links.map(|(name, _)| Step::Unlink(format!("ports/{id}/subsystems/{name}"))));
        }
        if let Some(id) = foreign {
            plan.problem(
                subject,
                format!("it is to be removed, but port {id}, which is not this target's, carries it"),
            );
            continue;
        }
        let at = format!("subsystems/{nqn}");
        for (id, namespace) in &found.namespaces {
            steps.extend(remove_namespace(nqn, *id, namespace));
        }
        steps.extend(found.hosts.keys().map(|name| Step::Unlink(format!("{at}/allowed_hosts/{name}"))));
        steps.push(Step::Remove(at));
        steps.extend(forsaken_hosts(found.hosts.values(), wanted, observed));
        plan.task(subject, "removed", steps);
    }
}

fn remove_namespace(nqn: &str, id: u32, namespace: &observed::Namespace) -> Vec<Step> {
    let at = format!("subsystems/{nqn}/namespaces/{id}");
    let disable = namespace.enabled.then(|| Step::Set(format!("{at}/enable"), "0".into()));
    disable.into_iter().chain([Step::Remove(at)]).collect()
}

/// Hosts that no subsystem allows after one subsystem has removed them.
fn forsaken_hosts<'a>(
    hosts: impl Iterator<Item = &'a String>,
    wanted: &Wanted,
    observed: &Observed,
) -> Vec<Step> {
    hosts
        .filter(|host| observed.uses(host) <= 1 && is_ours_to_forget(host, wanted, observed))
        .map(|host| Step::RemoveUnused(format!("hosts/{host}")))
        .collect()
}

fn is_ours_to_forget(host: &str, wanted: &Wanted, observed: &Observed) -> bool {
    let has_key = observed.hosts.get(host).is_some_and(|host| host.has_key);
    let is_wanted = wanted.subsystems.iter().any(|s| s.hosts.iter().any(|name| name.as_str() == host));
    // This target sets no keys: a key was set by another program.
    !has_key && !is_wanted
}

/// Removes configured hosts that no subsystem allows: they are left over from a crash.
fn remove_hosts(wanted: &Wanted, observed: &Observed, plan: &mut Plan) {
    for host in observed.hosts.keys() {
        if wanted.known.contains(host)
            && observed.uses(host) == 0
            && is_ours_to_forget(host, wanted, observed)
        {
            let steps = vec![Step::RemoveUnused(format!("hosts/{host}"))];
            plan.task(Subject::Host(host.clone()), "removed", steps);
        }
    }
}

/// Assigns a kernel number to each required port that is available, and removes our ports that are not required.
fn match_ports<'a>(wanted: &'a Wanted, observed: &Observed, plan: &mut Plan) -> Vec<(&'a Port, u16)> {
    let owner = &wanted.owner;
    let mut matched = Vec::new();
    let mut taken: BTreeSet<u16> = observed.ports.keys().copied().collect();
    let mut unknown = false;
    for port in &wanted.ports {
        let subject = Subject::Port(port.config.to_string());
        let address = match &port.address {
            Ok(address) => *address,
            Err(why) => {
                unknown = true;
                plan.problem(subject, why.clone());
                continue;
            }
        };
        let same = observed.ports.iter().filter(|(_, found)| is_at(found, &port.config, address));
        let (ours, others): (Vec<_>, Vec<_>) =
            same.map(|(id, found)| (*id, found)).partition(|(id, found)| is_marked(owner, *id, found));
        if let Some((id, _)) = ours.first() {
            matched.push((port, *id));
        } else if let Some((id, _)) = others.iter().find(|(id, found)| !owner.owns_port(*id, found)) {
            plan.problem(
                subject,
                format!("port {id} of the kernel's target, which is not this target's, is there"),
            );
        } else if let Some(id) = owner.ports().find(|id| !taken.contains(id)) {
            taken.insert(id);
            matched.push((port, id));
        } else {
            plan.problem(subject, "all port numbers of this target are taken");
        }
    }
    for (id, found) in &observed.ports {
        let is_wanted = matched.iter().any(|(_, matched)| matched == id);
        // One of our ports may belong to an interface that has no address at the moment.
        let may_be_wanted = unknown && is_marked(owner, *id, found);
        if owner.owns_port(*id, found) && !is_wanted && !may_be_wanted {
            remove_port(*id, found, wanted, observed, plan);
        }
    }
    matched
}

fn is_marked(owner: &Owner, id: u16, port: &observed::Port) -> bool {
    port.referrals.contains(&owner.referral()) && owner.owns_port(id, port)
}

fn is_at(found: &observed::Port, port: &config::Port, address: IpAddr) -> bool {
    found.transport == port.transport.as_str()
        && found.address.parse() == Ok(address)
        && found.service == port.service.to_string()
}

fn remove_port(id: u16, port: &observed::Port, wanted: &Wanted, observed: &Observed, plan: &mut Plan) {
    let subject = Subject::PortNumber(id);
    let is_ours =
        |nqn: &String| observed.subsystems.get(nqn).is_some_and(|found| wanted.owner.owns_subsystem(found));
    if let Some(nqn) = port.subsystems.values().find(|nqn| !is_ours(nqn)) {
        let why = format!("it is to be removed, but carries {nqn}, which is not this target's");
        return plan.problem(subject, why);
    }
    let own = wanted.owner.referral();
    if let Some(name) = port.referrals.iter().find(|name| **name != own) {
        return plan.problem(
            subject,
            format!("it is to be removed, but it has the referral {name}, which is not ours"),
        );
    }
    let links = port.subsystems.keys().map(|name| Step::Unlink(format!("ports/{id}/subsystems/{name}")));
    let marks = port.referrals.iter().map(|name| Step::Remove(format!("ports/{id}/referrals/{name}")));
    let steps = links.chain(marks).chain([Step::Remove(format!("ports/{id}"))]).collect();
    plan.task(subject, "removed", steps);
}

/// Whether the subsystem is ours, or is being created.
fn make_subsystem(
    wanted: &Wanted,
    subsystem: &config::Subsystem,
    observed: &Observed,
    grounds: &BTreeMap<Key, Ground>,
    plan: &mut Plan,
) -> bool {
    let nqn = subsystem.nqn.as_str();
    let subject = Subject::Subsystem(nqn.into());
    let at = format!("subsystems/{nqn}");
    let found = observed.subsystems.get(nqn);
    let set = |name: &str, value: String| Step::Set(format!("{at}/{name}"), value);
    let serial = owner::serial(nqn);
    let mut steps = Vec::new();
    match found {
        None => {
            steps.push(Step::Make(at.clone()));
            steps.push(set("attr_model", wanted.owner.model()));
            steps.push(set("attr_serial", serial));
        }
        Some(found) if wanted.owner.owns_subsystem(found) => {
            // Hosts that have already read it would not notice a new one.
            if found.serial != serial && observed.carriers(nqn).next().is_none() {
                steps.push(set("attr_serial", serial));
            }
            if found.any_host {
                steps.push(set("attr_allow_any_host", "0".into()));
            }
        }
        Some(found) if owner::is_empty(nqn, found, observed) => {
            steps.push(set("attr_model", wanted.owner.model()));
            steps.push(set("attr_serial", serial));
        }
        Some(_) => {
            let why = "the kernel's target has one of this name that is not this target's: remove it, or give another name";
            plan.problem(subject, why);
            return false;
        }
    }
    if !steps.is_empty() {
        plan.task(subject, "made", steps);
    }
    let empty = observed::Subsystem::default();
    let found = found.unwrap_or(&empty);
    for (id, namespace) in &found.namespaces {
        if !subsystem.namespaces.iter().any(|wanted| wanted.id == *id) {
            plan.task(
                Subject::Namespace((nqn.into(), *id)),
                "removed",
                remove_namespace(nqn, *id, namespace),
            );
        }
    }
    for namespace in &subsystem.namespaces {
        let key = (nqn.to_owned(), namespace.id);
        if let Some(ground) = grounds.get(&key) {
            make_namespace(&key, namespace, found.namespaces.get(&namespace.id), ground, plan);
        }
    }
    let_hosts_in(subsystem, found, wanted, observed, plan);
    true
}

fn let_hosts_in(
    subsystem: &config::Subsystem,
    found: &observed::Subsystem,
    wanted: &Wanted,
    observed: &Observed,
    plan: &mut Plan,
) {
    let nqn = subsystem.nqn.as_str();
    let at = format!("subsystems/{nqn}/allowed_hosts");
    for (name, host) in &found.hosts {
        if !subsystem.hosts.iter().any(|wanted| wanted.as_str() == host) {
            let mut steps = vec![Step::Unlink(format!("{at}/{name}"))];
            steps.extend(forsaken_hosts([host].into_iter(), wanted, observed));
            plan.task(Subject::Host(host.clone()), "no longer allowed", steps);
        }
    }
    for host in &subsystem.hosts {
        let host = host.as_str();
        if found.hosts.values().any(|name| name == host) {
            continue;
        }
        let to = format!("hosts/{host}");
        let planned = |task: &Task| task.steps.contains(&Step::Make(to.clone()));
        let mut steps = Vec::new();
        if !observed.hosts.contains_key(host) && !plan.tasks.iter().any(planned) {
            steps.push(Step::Make(to.clone()));
        }
        steps.push(Step::Link { to, at: format!("{at}/{host}") });
        plan.task(Subject::Host(host.into()), "allowed", steps);
        if let Some(task) = plan.tasks.last_mut() {
            task.needs = Some(Subject::Subsystem(nqn.into()));
        }
    }
}

fn make_namespace(
    key: &Key,
    wanted: &config::Namespace,
    found: Option<&observed::Namespace>,
    ground: &Ground,
    plan: &mut Plan,
) {
    let subject = Subject::Namespace(key.clone());
    let at = format!("subsystems/{}/namespaces/{}", key.0, key.1);
    let set = |name: &str, value: String| Step::Set(format!("{at}/{name}"), value);
    let enabled = found.filter(|found| found.enabled);
    // A file that must grow is grown first.
    let file_bytes = match (&wanted.source, &ground.there) {
        (Source::File { bytes, .. }, There::Offered { bytes: now } | There::Fit { bytes: now, .. })
            if now < bytes =>
        {
            Some(*bytes)
        }
        _ => None,
    };
    let mut steps: Vec<Step> = file_bytes
        .map(|bytes| Step::GrowFile { path: wanted.source.path().into(), bytes })
        .into_iter()
        .collect();
    match (forgets(wanted, ground), &ground.there) {
        // Hosts that use it are not disconnected for this.
        (Some(why), _) if enabled.is_some() => plan.problem(subject.clone(), why),
        (Some(why), _) => return plan.problem(subject, why),
        (None, There::Offered { .. } | There::Fit { .. })
            if ground.cache == Cache::CanBeDurable && !wanted.volatile_cache =>
        {
            steps.push(Step::WriteThrough(wanted.source.path().into()));
        }
        _ => {}
    }
    let (what, tells) = match (enabled, &ground.there) {
        (Some(found), _) if found.uuid != Some(wanted.uuid) => {
            let why = "it is offered under another UUID, which hosts know it by: take it out of the configuration first, or give the UUID back";
            return plan.problem(subject, why);
        }
        (Some(found), _) if found.reservations != Some(true) => {
            return plan.problem(
                subject,
                "it is offered without reservations: take it out of the configuration first",
            );
        }
        (Some(_), There::Unfit(why)) => return plan.problem(subject, why),
        (Some(_), There::ToMake) => {
            let why = "its file has gone; what hosts write goes into the deleted one, and is lost when the target ends";
            return plan.problem(subject, why);
        }
        (Some(_), There::Offered { bytes }) => {
            let bytes = file_bytes.unwrap_or(*bytes);
            let reported = ground.reported_bytes == Some(bytes);
            if reported && steps.is_empty() {
                return;
            }
            steps.extend((!reported).then(|| set("revalidate_size", "1".into())));
            ("size reported", Some(Tells::Size(bytes)))
        }
        (Some(_), There::Fit { path, bytes }) => {
            if let Held::Other(now_on) = &ground.held
                && now_on == path
            {
                let why = format!(
                    "another file is now at {}; the kernel still offers the one that was: take it out of the configuration first",
                    path.display()
                );
                return plan.problem(subject, why);
            }
            if let Held::Other(now_on) = &ground.held {
                let why = format!(
                    "it is offered from {}: take it out of the configuration first to have it on {}",
                    now_on.display(),
                    path.display()
                );
                return plan.problem(subject, why);
            }
            // The drive was removed and reattached; the kernel still uses the stale device.
            steps.push(set("enable", "0".into()));
            steps.push(set("device_path", path.display().to_string()));
            steps.push(set("enable", "1".into()));
            ("offered again", Some(Tells::Offered(file_bytes.unwrap_or(*bytes))))
        }
        (None, There::Unfit(why)) => return plan.problem(subject, why),
        (None, There::Offered { .. }) => return,
        (None, There::ToMake) => {
            let bytes = match &wanted.source {
                Source::File { bytes, .. } => *bytes,
                Source::Device(_) => FILE_BYTES_MIN,
            };
            steps.push(Step::MakeFile { path: wanted.source.path().into(), bytes });
            ("file made", None)
        }
        (None, There::Fit { path, bytes }) => {
            if found.is_none() {
                steps.push(Step::Make(at.clone()));
            }
            steps.push(set("device_path", path.display().to_string()));
            steps.push(set("device_uuid", wanted.uuid.to_string()));
            // Must be set before the namespace is enabled; Linux 6.13.
            steps.push(set("resv_enable", "1".into()));
            steps.push(set("enable", "1".into()));
            ("offered", Some(Tells::Offered(file_bytes.unwrap_or(*bytes))))
        }
    };
    let needs = Some(Subject::Subsystem(key.0.clone()));
    plan.tasks.push(Task { subject, needs, what, steps, tells });
}

/// Why flushed data could be lost on a power loss, if the configuration does not accept this.
pub(crate) fn forgets(wanted: &config::Namespace, ground: &Ground) -> Option<String> {
    match (&ground.cache, &ground.there) {
        (Cache::Volatile(why), There::Offered { .. } | There::Fit { .. }) if !wanted.volatile_cache => {
            Some(format!(
                "{}: {why}, and so could what hosts have flushed be lost: turn the cache off, use a drive that keeps its cache, or accept it by allow_volatile_cache (docs/guides/target.md)",
                wanted.source.path().display()
            ))
        }
        _ => None,
    }
}

fn make_port(port: &Port, id: u16, offered: &[&str], wanted: &Wanted, observed: &Observed, plan: &mut Plan) {
    let Ok(address) = port.address else { return };
    let subject = Subject::Port(port.config.to_string());
    let at = format!("ports/{id}");
    let found = observed.ports.get(&id);
    if found.is_none() {
        let set = |name: &str, value: String| Step::Set(format!("{at}/{name}"), value);
        let steps = vec![
            Step::Make(at.clone()),
            Step::Make(format!("{at}/referrals/{}", wanted.owner.referral())),
            set("addr_trtype", Transport::as_str(port.config.transport).into()),
            set("addr_adrfam", if address.is_ipv4() { "ipv4" } else { "ipv6" }.into()),
            set("addr_traddr", address.to_string()),
            set("addr_trsvcid", port.config.service.to_string()),
        ];
        plan.task(subject.clone(), "made", steps);
    }
    for nqn in offered {
        let carries = |found: &observed::Port| found.subsystems.values().any(|carried| carried == nqn);
        if found.is_some_and(carries) {
            continue;
        }
        // The first link of a port makes the kernel listen.
        let steps =
            vec![Step::Link { to: format!("subsystems/{nqn}"), at: format!("{at}/subsystems/{nqn}") }];
        plan.task(subject.clone(), "carries a subsystem more", steps);
        if let Some(task) = plan.tasks.last_mut() {
            task.needs = Some(Subject::Subsystem((*nqn).into()));
        }
    }
}
