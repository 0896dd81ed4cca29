//! Tests the rules of [`super`] on a target in memory that follows NVMe Base 7.2 to 7.6 as nvmet does.

use std::cell::{Cell, RefCell};

use proptest::prelude::*;

use super::*;

/// A target with one namespace.
#[derive(Default)]
struct Target {
    registrants: RefCell<Vec<(HostId, ReservationKey)>>,
    /// Host and type.
    holder: Cell<Option<(HostId, ReservationType)>>,
    /// Hosts with aborted commands, in order.
    aborted: RefCell<Vec<HostId>>,
    /// A preempt-and-abort got no response: the commands of its victims may still be in flight.
    in_flight: Cell<bool>,
}

impl Target {
    /// Simulates a power loss; no reservation persists.
    fn restart(&self) {
        self.registrants.borrow_mut().clear();
        self.holder.set(None);
        self.in_flight.set(false);
    }

    /// Whether the target accepts a write from this host.
    fn accepts_write(&self, host: HostId) -> bool {
        self.holder.get().is_none_or(|(holder, _)| holder == host)
    }

    fn seen_by(&self, host: u8) -> View<'_> {
        View { target: self, host: HostId([host; 16]), between: RefCell::default() }
    }
}

type Event<'a> = Box<dyn FnOnce() + 'a>;

/// A target as one host sees it.
struct View<'a> {
    target: &'a Target,
    host: HostId,
    /// Actions of other hosts after this host's next reports.
    between: RefCell<Vec<Event<'a>>>,
}

impl View<'_> {
    fn key(&self) -> Option<ReservationKey> {
        self.target.registrants.borrow().iter().find(|(host, _)| *host == self.host).map(|(_, key)| *key)
    }

    fn registered(&self, key: ReservationKey) -> Result<(), ReservationError> {
        if self.key() == Some(key) { Ok(()) } else { Err(ReservationError::Conflict) }
    }
}

impl Reservations for View<'_> {
    fn report(&self) -> Result<Report, ReservationError> {
        let holder = self.target.holder.get();
        let registrant = |&(host, key): &(HostId, ReservationKey)| Registrant {
            host,
            key,
            holds: holder.is_some_and(|(holder, _)| holder == host),
        };
        let registrants = self.target.registrants.borrow().iter().map(registrant).collect();
        let report = Report { generation: 0, reservation: holder.map(|(_, kind)| kind), registrants };
        let event = self.between.borrow_mut().pop();
        if let Some(event) = event {
            event();
        }
        Ok(report)
    }

    fn register(&self, key: ReservationKey) -> Result<(), ReservationError> {
        match self.key() {
            None => self.target.registrants.borrow_mut().push((self.host, key)),
            Some(same) if same == key => {}
            Some(_) => return Err(ReservationError::Conflict),
        }
        Ok(())
    }

    fn replace(&self, old: ReservationKey, new: ReservationKey) -> Result<(), ReservationError> {
        self.registered(old)?;
        for registrant in
            self.target.registrants.borrow_mut().iter_mut().filter(|(host, _)| *host == self.host)
        {
            registrant.1 = new;
        }
        Ok(())
    }

    fn reserve(&self, key: ReservationKey) -> Result<(), ReservationError> {
        self.registered(key)?;
        match self.target.holder.get() {
            Some((holder, _)) if holder != self.host => Err(ReservationError::Conflict),
            _ => {
                self.target.holder.set(Some((self.host, ReservationType::ExclusiveAccess)));
                Ok(())
            }
        }
    }

    fn preempt_and_abort(&self, old: ReservationKey, key: ReservationKey) -> Result<(), ReservationError> {
        self.registered(key)?;
        let holder = self.target.holder.get().map(|(host, _)| host);
        if holder == Some(self.host) {
            return Ok(());
        }
        let victims: Vec<HostId> = {
            let registrants = self.target.registrants.borrow();
            registrants.iter().filter(|(_, key)| *key == old).map(|(host, _)| *host).collect()
        };
        if victims.is_empty() {
            return Err(ReservationError::Conflict);
        }
        if holder.is_some_and(|holder| victims.contains(&holder)) {
            self.target.holder.set(Some((self.host, ReservationType::ExclusiveAccess)));
        }
        self.target
            .registrants
            .borrow_mut()
            .retain(|(host, _)| !victims.contains(host) || *host == self.host);
        self.target.aborted.borrow_mut().extend(victims);
        Ok(())
    }

    fn release(&self, key: ReservationKey) -> Result<(), ReservationError> {
        self.registered(key)?;
        if self.target.holder.get().is_some_and(|(holder, _)| holder == self.host) {
            self.target.holder.set(None);
        }
        Ok(())
    }

    fn unregister(&self, key: ReservationKey) -> Result<(), ReservationError> {
        self.registered(key)?;
        self.target.registrants.borrow_mut().retain(|(host, _)| *host != self.host);
        if self.target.holder.get().is_some_and(|(holder, _)| holder == self.host) {
            self.target.holder.set(None);
        }
        Ok(())
    }
}

/// Loses the path at this command, counted from 0, whether or not the command was executed.
struct Failing<'a> {
    view: View<'a>,
    at: Cell<Option<usize>>,
    done: bool,
}

impl<'a> Failing<'a> {
    fn new(view: View<'a>, at: Option<usize>, done: bool) -> Self {
        Self { view, at: Cell::new(at), done }
    }

    fn execute<T>(
        &self,
        command: impl FnOnce(&View<'a>) -> Result<T, ReservationError>,
    ) -> Result<T, ReservationError> {
        let left = self.at.get();
        self.at.set(left.map(|left| left.wrapping_sub(1)));
        if left != Some(0) {
            return command(&self.view);
        }
        if self.done {
            drop(command(&self.view));
        }
        Err(ReservationError::NoPath)
    }
}

impl Reservations for Failing<'_> {
    fn report(&self) -> Result<Report, ReservationError> {
        self.execute(View::report)
    }

    fn register(&self, key: ReservationKey) -> Result<(), ReservationError> {
        self.execute(|view| view.register(key))
    }

    fn replace(&self, old: ReservationKey, new: ReservationKey) -> Result<(), ReservationError> {
        self.execute(|view| view.replace(old, new))
    }

    fn reserve(&self, key: ReservationKey) -> Result<(), ReservationError> {
        self.execute(|view| view.reserve(key))
    }

    fn preempt_and_abort(&self, old: ReservationKey, key: ReservationKey) -> Result<(), ReservationError> {
        let aborted = || self.view.target.aborted.borrow().len();
        let before = aborted();
        let answer = self.execute(|view| view.preempt_and_abort(old, key));
        if answer.is_err() && aborted() > before {
            self.view.target.in_flight.set(true);
        }
        answer
    }

    fn release(&self, key: ReservationKey) -> Result<(), ReservationError> {
        self.execute(|view| view.release(key))
    }

    fn unregister(&self, key: ReservationKey) -> Result<(), ReservationError> {
        self.execute(|view| view.unregister(key))
    }
}

/// Acquires the namespace and waits if necessary.
fn take(target: &dyn Reservations, on: &Target, me: &Me) -> Result<bool, NotAcquired> {
    match acquire(target, me)? {
        Acquired::Settled { preempted } => Ok(preempted),
        Acquired::Pending => {
            on.in_flight.set(false);
            settle(target, me)?;
            Ok(true)
        }
    }
}

fn me(host: u8, epoch: u32) -> Me {
    let instance = InstanceHash::of("fast-0");
    Me::new(instance, Epoch::new(epoch).expect("not 0"), HostId([host; 16]))
}

#[test]
fn acquire_of_a_free_namespace_succeeds_and_is_idempotent() {
    let target = Target::default();
    let one = target.seen_by(1);
    acquire(&one, &me(1, 1)).expect("the namespace is free");
    assert_eq!(check(&one, &me(1, 1)).expect("a report"), Check::Held);
    acquire(&one, &me(1, 1)).expect("this host holds it");
    assert!(target.accepts_write(HostId([1; 16])) && !target.accepts_write(HostId([2; 16])));
}

#[test]
fn later_epoch_preempts_and_the_earlier_one_is_superseded() {
    let target = Target::default();
    let (one, two) = (target.seen_by(1), target.seen_by(2));
    acquire(&one, &me(1, 1)).expect("the namespace is free");
    acquire(&two, &me(2, 2)).expect("an earlier epoch");
    assert_eq!(*target.aborted.borrow(), [HostId([1; 16])]);
    assert!(!target.accepts_write(HostId([1; 16])));
    let taken = Loss::Taken { host: HostId([2; 16]), key: me(2, 2).key() };
    assert_eq!(check(&one, &me(1, 1)).expect("a report"), Check::Lost(taken));
    // The earlier host returns and retries.
    let again = acquire(&one, &me(1, 1));
    assert!(matches!(again, Err(NotAcquired::Superseded { .. })), "{again:?}");
    assert_eq!(check(&two, &me(2, 2)).expect("a report"), Check::Held);
}

#[test]
fn same_host_moves_to_a_later_epoch_without_a_preempt() {
    let target = Target::default();
    let one = target.seen_by(1);
    acquire(&one, &me(1, 1)).expect("the namespace is free");
    acquire(&one, &me(1, 2)).expect("this host holds it");
    assert_eq!(check(&one, &me(1, 2)).expect("a report"), Check::Held);
    // The previous process, in case it still runs.
    assert_eq!(check(&one, &me(1, 1)).expect("a report"), Check::Lost(Loss::OtherKey(me(1, 2).key())));
    assert!(matches!(acquire(&one, &me(1, 1)), Err(NotAcquired::Superseded { .. })));
    assert!(target.aborted.borrow().is_empty());
}

#[test]
fn second_start_of_the_same_epoch_is_refused_as_a_twin() {
    let target = Target::default();
    let (one, two) = (target.seen_by(1), target.seen_by(2));
    acquire(&one, &me(1, 1)).expect("the namespace is free");
    assert!(matches!(acquire(&two, &me(2, 1)), Err(NotAcquired::Twin { .. })));
    assert_eq!(check(&one, &me(1, 1)).expect("a report"), Check::Held);
}

#[test]
fn registration_of_another_instance_is_never_preempted() {
    let target = Target::default();
    let (one, two) = (target.seen_by(1), target.seen_by(2));
    let stranger = Me { instance: InstanceHash::of("other"), ..me(1, 1) };
    acquire(&one, &stranger).expect("the namespace is free");
    for epoch in [1, 9] {
        let refused = acquire(&two, &me(2, epoch));
        assert!(matches!(refused, Err(NotAcquired::Stranger { .. })), "{refused:?}");
    }
    assert_eq!(target.registrants.borrow().len(), 1);
    assert_eq!(check(&one, &stranger).expect("a report"), Check::Held);
}

#[test]
fn check_detects_a_target_that_lost_its_reservations() {
    let target = Target::default();
    let one = target.seen_by(1);
    acquire(&one, &me(1, 1)).expect("the namespace is free");
    target.restart();
    assert_eq!(check(&one, &me(1, 1)).expect("a report"), Check::Lost(Loss::Forgotten));
}

#[test]
fn earlier_epoch_registered_without_reservation_is_preempted() {
    let target = Target::default();
    let (one, two) = (target.seen_by(1), target.seen_by(2));
    one.register(me(1, 1).key()).expect("a registration");
    acquire(&two, &me(2, 2)).expect("the namespace is free");
    assert!(one.reserve(me(1, 1).key()).is_err());
    assert_eq!(check(&two, &me(2, 2)).expect("a report"), Check::Held);
}

#[test]
fn write_exclusive_reservation_does_not_count_as_held() {
    let target = Target::default();
    let one = target.seen_by(1);
    one.register(me(1, 1).key()).expect("a registration");
    target.holder.set(Some((HostId([1; 16]), ReservationType::WriteExclusive)));
    let kind = ReservationType::WriteExclusive;
    assert_eq!(check(&one, &me(1, 1)).expect("a report"), Check::Lost(Loss::OtherType(kind)));
    assert!(matches!(acquire(&one, &me(1, 1)), Err(NotAcquired::OtherType(_))));
}

/// An instance of the same name in a cluster.
fn of_cluster(cluster: &str, host: u8, epoch: u32) -> Me {
    let former = Some(InstanceHash::of("fast-0"));
    Me { instance: InstanceHash::in_cluster(cluster, "fast-0"), former, ..me(host, epoch) }
}

#[test]
fn instance_of_another_cluster_takes_over_only_by_adoption() {
    let target = Target::default();
    let (one, two) = (target.seen_by(1), target.seen_by(2));
    acquire(&one, &of_cluster("c1", 1, 3)).expect("the namespace is free");
    for epoch in [2, 3, 9] {
        let other = acquire(&two, &of_cluster("c2", 2, epoch));
        assert!(matches!(other, Err(NotAcquired::Stranger { .. })), "{other:?}");
    }
    assert_eq!(check(&one, &of_cluster("c1", 1, 3)).expect("a report"), Check::Held);
    // An administrator declares the first cluster, as last seen, permanently gone.
    let earlier = Me { adopts: Some(of_cluster("c1", 1, 2).key()), ..of_cluster("c2", 2, 1) };
    assert!(matches!(acquire(&two, &earlier), Err(NotAcquired::Stranger { .. })), "an outdated key");
    let adopting = Me { adopts: Some(of_cluster("c1", 1, 3).key()), ..of_cluster("c2", 2, 1) };
    // It is unknown whether this is its pending key.
    assert_eq!(acquire(&two, &adopting).expect("adoption is allowed"), Acquired::Pending);
    assert_eq!(settle(&two, &adopting).expect("a report"), Check::Held);
    assert!(!target.accepts_write(HostId([1; 16])));
    let back = acquire(&one, &of_cluster("c1", 1, 4));
    assert!(matches!(back, Err(NotAcquired::Stranger { .. })), "{back:?}");
}

#[test]
fn later_epoch_with_a_cluster_preempts_the_key_without_cluster() {
    let target = Target::default();
    let (former, now) = (target.seen_by(1), target.seen_by(2));
    acquire(&former, &me(1, 4)).expect("the namespace is free");
    let same = acquire(&now, &of_cluster("c1", 2, 4));
    assert!(matches!(same, Err(NotAcquired::Superseded { .. })), "{same:?}");
    acquire(&now, &of_cluster("c1", 2, 5)).expect("an earlier epoch");
    assert_eq!(*target.aborted.borrow(), [HostId([1; 16])]);
    // The old instance, started again, does not recognize its later self.
    assert!(matches!(acquire(&former, &me(1, 4)), Err(NotAcquired::Stranger { .. })));
}

#[test]
fn release_is_idempotent_and_frees_the_namespace_for_other_hosts() {
    let target = Target::default();
    let (one, two) = (target.seen_by(1), target.seen_by(2));
    acquire(&one, &me(1, 1)).expect("the namespace is free");
    release(&one, &me(1, 1)).expect("this host holds it");
    release(&one, &me(1, 1)).expect("there is nothing to release");
    assert!(target.registrants.borrow().is_empty() && target.holder.get().is_none());
    acquire(&two, &me(2, 1)).expect("the namespace is free");
    // We do not release what another host holds.
    release(&one, &me(1, 1)).expect("there is nothing to release");
    assert_eq!(check(&two, &me(2, 1)).expect("a report"), Check::Held);
}

/// Host 1 held the reservation in epoch 1; the preempt by host 2 in epoch 2 was executed but got no response.
fn target_after_unanswered_preempt() -> Target {
    let target = Target::default();
    acquire(&target.seen_by(1), &me(1, 1)).expect("the namespace is free");
    // A report, the registration, another report, the preempt.
    let lost = acquire(&Failing::new(target.seen_by(2), Some(3), true), &me(2, 2));
    assert!(matches!(lost, Err(NotAcquired::Reservation(ReservationError::NoPath))), "{lost:?}");
    assert!(target.in_flight.get() && target.accepts_write(HostId([2; 16])));
    target
}

#[test]
fn acquire_stays_pending_until_settled_after_an_unanswered_preempt() {
    let target = target_after_unanswered_preempt();
    let two = target.seen_by(2);
    assert_eq!(check(&two, &me(2, 2)).expect("a report"), Check::Lost(Loss::Pending));
    // Also after repeated restarts.
    for _ in 0..2 {
        assert_eq!(acquire(&two, &me(2, 2)).expect("registered"), Acquired::Pending);
        release(&two, &me(2, 2)).expect("nothing is released");
        assert_eq!(check(&two, &me(2, 2)).expect("a report"), Check::Lost(Loss::Pending));
    }
    assert_eq!(settle(&two, &me(2, 2)).expect("a report"), Check::Held);
    assert_eq!(settle(&two, &me(2, 2)).expect("a report"), Check::Held);
    assert_eq!(acquire(&two, &me(2, 2)).expect("registered"), Acquired::Settled { preempted: false });
}

#[test]
fn later_epoch_waits_for_the_unanswered_preempt_of_an_earlier_epoch() {
    // On the same host, which replaces the key of its registration, and on other hosts, which preempt it.
    for host in [2, 1, 3] {
        let target = target_after_unanswered_preempt();
        let (view, later) = (target.seen_by(host), me(host, 3));
        announce(&view, &later).expect("this epoch is later");
        assert_eq!(acquire(&view, &later).expect("an earlier epoch"), Acquired::Pending, "{host}");
        assert_eq!(settle(&target.seen_by(2), &me(2, 2)).ok(), check(&target.seen_by(2), &me(2, 2)).ok());
        assert_eq!(settle(&view, &later).expect("a report"), Check::Held);
        assert!(matches!(acquire(&target.seen_by(2), &me(2, 2)), Err(NotAcquired::Superseded { .. })));
    }
}

/// The target has lost its state; hosts 1 and 3 are registered again, and there is no holder. Host 2 has preempted one of them
/// in epoch 3.
fn target_after_one_of_two_preempts() -> Target {
    let target = Target::default();
    for (host, epoch) in [(1, 1), (3, 2)] {
        target.seen_by(host).register(me(host, epoch).key()).expect("a registration");
    }
    let lost = acquire(&Failing::new(target.seen_by(2), Some(3), true), &me(2, 3));
    assert!(lost.is_err() && target.in_flight.get() && target.registrants.borrow().len() == 2, "{lost:?}");
    target
}

#[test]
fn unanswered_preempt_keeps_every_other_acquire_of_the_host_pending() {
    // The preempt of the other host gets a response, in the same start and in a later one.
    for epoch in [3, 4] {
        let target = target_after_one_of_two_preempts();
        let again = acquire(&target.seen_by(2), &me(2, epoch));
        assert_eq!(again.expect("earlier epochs"), Acquired::Pending, "{epoch}");
        assert_eq!(target.aborted.borrow().len(), 2, "{epoch}");
    }
    // No other host remains to be preempted.
    let target = target_after_one_of_two_preempts();
    target.seen_by(1).unregister(me(1, 1).key()).expect("host 1 is registered");
    assert_eq!(acquire(&target.seen_by(2), &me(2, 4)).expect("the namespace is free"), Acquired::Pending);
    // Another process of this host acts between our report and our registration.
    let target = Target::default();
    acquire(&target.seen_by(1), &me(1, 1)).expect("the namespace is free");
    let other = Failing::new(target.seen_by(2), Some(3), true);
    let one = target.seen_by(2);
    one.between.borrow_mut().push(Box::new(|| drop(acquire(&other, &me(2, 2)))));
    assert_eq!(acquire(&one, &me(2, 2)).expect("an earlier epoch"), Acquired::Pending);
    assert!(target.in_flight.get());
}

#[test]
fn pending_key_is_treated_like_the_settled_key_by_other_hosts() {
    let target = target_after_unanswered_preempt();
    let three = target.seen_by(3);
    assert!(matches!(acquire(&three, &me(3, 1)), Err(NotAcquired::Superseded { .. })));
    assert!(matches!(acquire(&three, &me(3, 2)), Err(NotAcquired::Twin { .. })));
    let other = Me { instance: InstanceHash::of("other"), ..me(3, 9) };
    assert!(matches!(acquire(&three, &other), Err(NotAcquired::Stranger { .. })));
    // A key identifies a start: either key of the start can be adopted.
    for key in [me(2, 2).key(), me(2, 2).pending_key()] {
        let target = target_after_unanswered_preempt();
        let adopting = Me { adopts: Some(key), ..other };
        assert_eq!(acquire(&target.seen_by(3), &adopting).expect("adoption is allowed"), Acquired::Pending);
    }
    let again = Me { adopts: Some(me(2, 1).pending_key()), ..other };
    assert!(matches!(acquire(&three, &again), Err(NotAcquired::Stranger { .. })), "an outdated key");
}

#[test]
fn answered_preempt_needs_no_wait_and_ends_with_the_settled_key() {
    let target = Target::default();
    // As left by a version before pending keys: registered, and preempting with its own key.
    target.seen_by(1).register(me(1, 1).key()).expect("a registration");
    target.seen_by(1).reserve(me(1, 1).key()).expect("the namespace is free");
    target.seen_by(2).register(me(2, 2).key()).expect("a registration");
    let two = target.seen_by(2);
    assert_eq!(acquire(&two, &me(2, 2)).expect("an earlier epoch"), Acquired::Settled { preempted: true });
    assert_eq!(*target.registrants.borrow(), [(HostId([2; 16]), me(2, 2).key())]);
}

/// Possible actions, in any order.
#[derive(Clone, Copy, Debug)]
enum Action {
    /// The path is lost at this command.
    Acquire(u8, u32, Option<(usize, bool)>),
    Release(u8, u32),
    Restart,
}

fn action() -> impl Strategy<Value = Action> {
    let (host, epoch) = (1u8..4, 1u32..5);
    let lost = prop::option::of((0usize..10, any::<bool>()));
    prop_oneof![
        8 => (host.clone(), epoch.clone(), lost).prop_map(|(host, epoch, lost)| Action::Acquire(host, epoch, lost)),
        2 => (host, epoch).prop_map(|(host, epoch)| Action::Release(host, epoch)),
        1 => Just(Action::Restart),
    ]
}

proptest! {
    /// Hosts start, stop and return in any epoch, lose their paths at any command, and the target loses its state. No host
    /// holds the namespace while commands of a former holder are in flight.
    #[test]
    fn at_most_one_host_holds_and_no_older_epoch_acquires(
        actions in prop::collection::vec(action(), 1..24),
    ) {
        let target = Target::default();
        for action in actions {
            match action {
                Action::Acquire(host, epoch, lost) => {
                    let (view, me) = (target.seen_by(host), me(host, epoch));
                    let failing = Failing::new(target.seen_by(host), lost.map(|(at, _)| at), lost.is_some_and(|(_, done)| done));
                    let newest = target.registrants.borrow().iter().filter_map(|(_, key)| key.epoch_of(me.instance)).max();
                    let before = check(&view, &me).expect("a report") == Check::Held;
                    let taken = take(&failing, &target, &me);
                    prop_assert!(taken.is_err() || newest.is_none_or(|newest| newest <= me.epoch));
                    let held = check(&view, &me).expect("a report") == Check::Held;
                    // A command that got no response may have been the last one that was missing.
                    let unanswered = matches!(taken, Err(NotAcquired::Reservation(_)));
                    prop_assert!(held || taken.is_err());
                    prop_assert!(!held || taken.is_ok() || unanswered || before, "{:?}", taken);
                }
                Action::Release(host, epoch) => release(&target.seen_by(host), &me(host, epoch)).expect("no error"),
                Action::Restart => target.restart(),
            }
            let held = (1..4).flat_map(|host| (1..5).map(move |epoch| me(host, epoch)));
            let held: Vec<Me> = held
                .filter(|me| check(&target.seen_by(me.host.0[0]), me).expect("a report") == Check::Held)
                .collect();
            prop_assert!(held.len() <= 1, "{:?}", held);
            prop_assert!(held.is_empty() || !target.in_flight.get(), "{:?}", held);
            if let [holder] = held[..] {
                for host in 1..4 {
                    prop_assert_eq!(target.accepts_write(HostId([host; 16])), holder.host == HostId([host; 16]));
                }
            }
        }
    }

    /// Between a report and the step that follows from it, the other host performs its whole acquisition.
    #[test]
    fn concurrent_acquires_end_with_at_most_one_holder(
        at in 0usize..6,
        epochs in (1u32..4, 1u32..4),
        before in prop::option::of(0u32..4),
    ) {
        let target = Target::default();
        if let Some(epoch) = before.filter(|epoch| *epoch > 0) {
            let _ = take(&target.seen_by(3), &target, &me(3, epoch));
        }
        let (two, other) = (target.seen_by(2), RefCell::new(None));
        let one = target.seen_by(1);
        let mut events: Vec<Event<'_>> = (0..at).map(|_| Box::new(|| ()) as Event<'_>).collect();
        events.insert(0, Box::new(|| *other.borrow_mut() = Some(take(&two, &target, &me(2, epochs.1)))));
        *one.between.borrow_mut() = events;
        let first = take(&one, &target, &me(1, epochs.0));
        // A loser that was reported as the winner must find out at its next check.
        let held = |view: &View<'_>, me: &Me| check(view, me).expect("a report") == Check::Held;
        one.between.borrow_mut().clear();
        let holders = [held(&one, &me(1, epochs.0)), held(&two, &me(2, epochs.1))];
        prop_assert!(!(holders[0] && holders[1]));
        // The last host that acquired the namespace holds it; a refused host does not.
        prop_assert!(first.is_ok() || !holders[0]);
        if let Some(second) = other.take() {
            prop_assert!(second.is_ok() || !holders[1]);
            prop_assert!(epochs.0 == epochs.1 || !holders[usize::from(epochs.0 > epochs.1)]);
        }
        for (host, holds) in [(1, holders[0]), (2, holders[1])] {
            prop_assert!(!holds || target.accepts_write(HostId([host; 16])));
            prop_assert!(target.holder.get().is_none() || holds == target.accepts_write(HostId([host; 16])));
        }
    }
}
