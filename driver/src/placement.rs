//! Chooses the instance of a StorageCluster for a new volume: a pure function of the instances' state.

use forebay_proto::admin::{self, Quota};

/// Instances that a refusal names; the others are counted.
const NAMED_MAX: usize = 8;

/// One instance as input to the choice.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Candidate {
    pub(crate) name: String,
    /// Tie-breaker.
    pub(crate) ordinal: u32,
    /// Volumes that it already holds.
    pub(crate) volumes: u32,
    /// Its pools, or why it cannot be used now.
    pub(crate) pools: Result<Vec<Pool>, String>,
}

/// One pool of an instance.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Pool {
    /// The server's report; the pool has the name of the backend.
    pub(crate) reported: admin::Pool,
    /// Percentage of its size that may be provisioned.
    pub(crate) overcommit_percent: u32,
}

impl Pool {
    /// The bytes that can still be provisioned for volumes with this quota.
    pub(crate) fn available_bytes(&self, quota: Quota) -> u64 {
        match (quota, self.reported.has_quota()) {
            (Quota::Hard, false) | (Quota::None, true) => 0,
            _ => self.reported.available_bytes(self.overcommit_percent),
        }
    }
}

/// The requirements of the volume.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) size_bytes: u64,
    /// Only pools of this backend.
    pub(crate) backend: Option<&'a str>,
    pub(crate) quota: Quota,
    /// Only this instance, because the volume may already exist there.
    pub(crate) instance: Option<&'a str>,
}

/// The chosen place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) instance: String,
    pub(crate) pool: String,
    /// Whether the pool accounts for provisioned bytes.
    pub(crate) has_quota: bool,
}

/// Why no place was found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("it has no instance yet")]
    NoInstance,
    /// Instances that are not ready might have room.
    #[error("no ready instance has room for {wanted}: {found}")]
    NotReady { wanted: String, found: String },
    #[error("no instance has room for {wanted}: {found}")]
    Full { wanted: String, found: String },
    #[error("there is no backend {backend:?}, only {known}")]
    NoBackend { backend: String, known: String },
    #[error("no backend has quota {0}")]
    NoQuota(&'static str),
}

/// Chooses the pool with the most room; among equals, the instance with the fewest volumes; among those, the first one. Pools
/// without quota provision nothing and new volumes are empty, so their room is divided by the number of volumes: otherwise all
/// volumes would go to the largest disk.
pub(crate) fn choose(candidates: &[Candidate], wanted: Wanted<'_>) -> Result<Place, Refusal> {
    let candidates: Vec<&Candidate> =
        candidates.iter().filter(|c| wanted.instance.is_none_or(|name| c.name == name)).collect();
    if candidates.is_empty() {
        return Err(Refusal::NoInstance);
    }
    let fits = |pool: &Pool| wanted.backend.is_none_or(|backend| pool.reported.name == backend);
    let mut best: Option<(u64, &Candidate, &Pool)> = None;
    for candidate in &candidates {
        for pool in candidate.pools.iter().flatten().filter(|pool| fits(pool)) {
            let available_bytes = pool.available_bytes(wanted.quota);
            if available_bytes < wanted.size_bytes {
                continue;
            }
            let room = match pool.reported.has_quota() {
                true => available_bytes,
                false => available_bytes / (u64::from(candidate.volumes) + 1),
            };
            let is_better = best.is_none_or(|(best_room, other, _)| {
                let order = |room, c: &Candidate| (std::cmp::Reverse(room), c.volumes, c.ordinal);
                order(room, candidate) < order(best_room, other)
            });
            if is_better {
                best = Some((room, candidate, pool));
            }
        }
    }
    match best {
        Some((_, candidate, pool)) => {
            let (instance, pool, has_quota) =
                (candidate.name.clone(), pool.reported.name.clone(), pool.reported.has_quota());
            Ok(Place { instance, pool, has_quota })
        }
        None => Err(refusal(&candidates, wanted, fits)),
    }
}

fn refusal(candidates: &[&Candidate], wanted: Wanted<'_>, fits: impl Fn(&Pool) -> bool) -> Refusal {
    let is_known = candidates.iter().flat_map(|c| c.pools.iter().flatten()).any(&fits);
    let are_ready = candidates.iter().all(|c| c.pools.is_ok());
    if let (Some(backend), false, true) = (wanted.backend, is_known, are_ready) {
        let mut known: Vec<&str> = candidates
            .iter()
            .flat_map(|c| c.pools.iter().flatten())
            .map(|p| p.reported.name.as_str())
            .collect();
        known.sort_unstable();
        known.dedup();
        return Refusal::NoBackend { backend: backend.to_owned(), known: known.join(", ") };
    }
    let has_such_quota = |pool: &Pool| match wanted.quota {
        Quota::Unspecified => true,
        Quota::Hard => pool.reported.has_quota(),
        Quota::None => !pool.reported.has_quota(),
    };
    let pools = || candidates.iter().flat_map(|c| c.pools.iter().flatten()).filter(|pool| fits(pool));
    if are_ready && is_known && !pools().any(has_such_quota) {
        return Refusal::NoQuota(if wanted.quota == Quota::None { "none" } else { "hard" });
    }
    let mut found: Vec<String> = candidates
        .iter()
        .map(|candidate| match &candidate.pools {
            Err(why) => format!("{} is not ready ({why})", candidate.name),
            Ok(pools) => {
                let pools: Vec<String> = pools
                    .iter()
                    .filter(|pool| fits(pool))
                    .map(|pool| {
                        format!("{} in {}", mib(pool.available_bytes(wanted.quota)), pool.reported.name)
                    })
                    .collect();
                format!("{} has {}", candidate.name, pools.join(", "))
            }
        })
        .collect();
    if found.len() > NAMED_MAX {
        let more = found.len() - NAMED_MAX;
        found.truncate(NAMED_MAX);
        found.push(format!("and {more} more"));
    }
    let (wanted, found) = (mib(wanted.size_bytes), found.join("; "));
    if are_ready { Refusal::Full { wanted, found } } else { Refusal::NotReady { wanted, found } }
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    pub(crate) fn pool(name: &str, total_gib: u64, provisioned_gib: u64) -> Pool {
        let reported = admin::Pool {
            name: name.into(),
            total_bytes: total_gib * GIB,
            free_bytes: total_gib * GIB,
            provisioned_bytes: provisioned_gib * GIB,
            quota: "project".into(),
            ..Default::default()
        };
        Pool { reported, overcommit_percent: 100 }
    }

    pub(crate) fn unlimited(name: &str, free_gib: u64) -> Pool {
        let mut pool = pool(name, free_gib, 0);
        pool.reported.quota = "none".into();
        pool
    }

    fn with_free(mut pool: Pool, free_bytes: u64) -> Pool {
        pool.reported.free_bytes = free_bytes;
        pool
    }

    pub(crate) fn ready(ordinal: u32, volumes: u32, pools: &[Pool]) -> Candidate {
        Candidate { name: format!("c-{ordinal}"), ordinal, volumes, pools: Ok(pools.to_vec()) }
    }

    fn away(ordinal: u32) -> Candidate {
        Candidate { name: format!("c-{ordinal}"), ordinal, volumes: 0, pools: Err("it starts".into()) }
    }

    pub(crate) fn wanted(size_gib: u64) -> Wanted<'static> {
        Wanted { size_bytes: size_gib * GIB, backend: None, quota: Quota::Unspecified, instance: None }
    }

    #[test]
    fn pool_with_the_most_room_is_chosen() {
        let fast = || Wanted { backend: Some("fast"), ..wanted(1) };
        let place = |n: u32, pool: &str| Some((format!("c-{n}"), pool.to_owned()));
        for (what, candidates, wanted, expected) in [
            ("one instance", vec![ready(0, 0, &[pool("a", 10, 0)])], wanted(10), place(0, "a")),
            (
                "most room",
                vec![ready(0, 0, &[pool("a", 10, 5)]), ready(1, 9, &[pool("a", 10, 4)])],
                wanted(1),
                place(1, "a"),
            ),
            (
                "with equal room, the one with fewer volumes",
                vec![ready(0, 2, &[pool("a", 10, 0)]), ready(1, 1, &[pool("a", 10, 0)])],
                wanted(1),
                place(1, "a"),
            ),
            (
                "otherwise the first, regardless of the order",
                vec![ready(1, 0, &[pool("a", 10, 0)]), ready(0, 0, &[pool("a", 10, 0)])],
                wanted(1),
                place(0, "a"),
            ),
            (
                "the second pool of an instance",
                vec![ready(0, 0, &[pool("a", 10, 0), pool("b", 20, 0)])],
                wanted(15),
                place(0, "b"),
            ),
            (
                "a backend that is requested",
                vec![ready(0, 0, &[pool("slow", 99, 0)]), ready(1, 0, &[pool("fast", 9, 0)])],
                fast(),
                place(1, "fast"),
            ),
            (
                "instances that are not ready are skipped",
                vec![away(0), ready(1, 0, &[pool("a", 2, 0)])],
                wanted(1),
                place(1, "a"),
            ),
            (
                "space used by others in the file system counts",
                vec![ready(0, 0, &[with_free(pool("a", 100, 0), GIB)]), ready(1, 0, &[pool("a", 10, 0)])],
                wanted(5),
                place(1, "a"),
            ),
            (
                "overcommit above 100 percent exceeds the capacity",
                vec![ready(0, 0, &[Pool { overcommit_percent: 300, ..pool("a", 10, 15) }])],
                wanted(15),
                place(0, "a"),
            ),
            (
                "overcommit below 100 percent keeps a reserve free",
                vec![ready(0, 0, &[Pool { overcommit_percent: 50, ..pool("a", 10, 0) }])],
                wanted(6),
                None,
            ),
            (
                "a full file system takes no volume, even with overcommit",
                vec![ready(0, 0, &[Pool { overcommit_percent: 300, ..with_free(pool("a", 10, 0), 0) }])],
                wanted(1),
                None,
            ),
            (
                "volumes without quota share what is free",
                vec![ready(0, 3, &[unlimited("a", 30)]), ready(1, 0, &[unlimited("a", 10)])],
                wanted(1),
                place(1, "a"),
            ),
            (
                "the instance that already has the volume",
                vec![ready(0, 0, &[pool("a", 10, 0)]), ready(1, 0, &[pool("a", 5, 0)])],
                Wanted { instance: Some("c-1"), ..wanted(1) },
                place(1, "a"),
            ),
            (
                "a pool with quota for a hard one",
                vec![ready(0, 0, &[unlimited("a", 50)]), ready(1, 0, &[pool("a", 5, 0)])],
                Wanted { quota: Quota::Hard, ..wanted(1) },
                place(1, "a"),
            ),
        ] {
            let chosen = choose(&candidates, wanted).ok().map(|p| (p.instance, p.pool));
            assert_eq!(chosen, expected, "{what}");
        }
    }

    #[test]
    fn refusal_names_the_missing_capacity_or_backend() {
        let fast = Wanted { backend: Some("fast"), ..wanted(1) };
        for (candidates, wanted, message) in [
            (vec![], wanted(1), "it has no instance yet"),
            (
                vec![ready(0, 0, &[pool("a", 1, 0), pool("b", 2, 1)]), ready(1, 0, &[pool("a", 3, 0)])],
                wanted(4),
                "no instance has room for 4096 MiB: c-0 has 1024 MiB in a, 1024 MiB in b; c-1 has 3072 MiB in a",
            ),
            (
                vec![away(0), ready(1, 0, &[pool("a", 3, 0)])],
                wanted(4),
                "no ready instance has room for 4096 MiB: c-0 is not ready (it starts); c-1 has 3072 MiB in a",
            ),
            (
                vec![ready(0, 0, &[pool("a", 1, 0), pool("b", 2, 1)])],
                fast,
                "there is no backend \"fast\", only a, b",
            ),
            (vec![away(0)], fast, "no ready instance has room for 1024 MiB: c-0 is not ready (it starts)"),
            (
                vec![ready(0, 0, &[unlimited("a", 50)])],
                Wanted { quota: Quota::Hard, ..wanted(1) },
                "no backend has quota hard",
            ),
        ] {
            assert_eq!(choose(&candidates, wanted).expect_err(message).to_string(), message);
        }
        let many: Vec<Candidate> = (0..64).map(|n| ready(n, 0, &[pool("a", 1, 0)])).collect();
        let message = choose(&many, wanted(2)).expect_err("too large").to_string();
        assert!(message.ends_with("c-7 has 1024 MiB in a; and 56 more"), "{message}");
    }

    #[test]
    fn pool_takes_only_volumes_of_its_quota_kind() {
        let (hard, none) = (pool("a", 90, 0), unlimited("a", 90));
        for (pool, quota, gib) in [
            (&hard, Quota::Unspecified, 90),
            (&hard, Quota::Hard, 90),
            (&hard, Quota::None, 0),
            (&none, Quota::Unspecified, 90),
            (&none, Quota::None, 90),
            (&none, Quota::Hard, 0),
        ] {
            assert_eq!(pool.available_bytes(quota), gib * GIB, "{pool:?} {quota:?}");
        }
    }
}
