//! Locks and flags shared by the threads of a server.
//!
//! They are the standard library's. In this crate's unit tests they can be tracked: within [`model::check`] loom runs the
//! threads of a test in every order that matters, and each use of a lock or flag is a point where it can switch to another
//! thread. So the code that is checked is the code that runs (docs/adr/0011-models-of-shared-state.md).

#[cfg(not(test))]
pub(crate) use std::sync::atomic::AtomicBool;
#[cfg(not(test))]
pub(crate) use std::sync::{Mutex, MutexGuard};

#[cfg(test)]
pub(crate) use followed::{AtomicBool, Mutex, MutexGuard};

#[cfg(test)]
mod followed {
    use std::ops::{Deref, DerefMut};
    use std::sync::atomic::Ordering;
    use std::sync::{LockResult, PoisonError};

    use super::model;

    /// As the standard library's.
    pub(crate) struct Mutex<T> {
        /// Present within a model; taken before `real`, which is then never contended.
        followed: Option<loom::sync::Mutex<()>>,
        real: std::sync::Mutex<T>,
    }

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            let followed = model::is_inside().then(|| loom::sync::Mutex::new(()));
            Self { followed, real: std::sync::Mutex::new(value) }
        }

        pub(crate) fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
            let followed =
                self.followed.as_ref().map(|lock| lock.lock().expect("no model goes on after a panic"));
            match self.real.lock() {
                Ok(real) => Ok(MutexGuard { real, _followed: followed }),
                Err(poisoned) => {
                    Err(PoisonError::new(MutexGuard { real: poisoned.into_inner(), _followed: followed }))
                }
            }
        }
    }

    impl<T: Default> Default for Mutex<T> {
        fn default() -> Self {
            Self::new(T::default())
        }
    }

    /// As the standard library's.
    pub(crate) struct MutexGuard<'a, T> {
        // Released first.
        real: std::sync::MutexGuard<'a, T>,
        _followed: Option<loom::sync::MutexGuard<'a, ()>>,
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            &self.real
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            &mut self.real
        }
    }

    /// As the standard library's. Within a model a load returns every value that its ordering allows.
    pub(crate) enum AtomicBool {
        Real(std::sync::atomic::AtomicBool),
        Followed(loom::sync::atomic::AtomicBool),
    }

    impl AtomicBool {
        pub(crate) fn new(value: bool) -> Self {
            if model::is_inside() {
                Self::Followed(loom::sync::atomic::AtomicBool::new(value))
            } else {
                Self::Real(std::sync::atomic::AtomicBool::new(value))
            }
        }

        pub(crate) fn load(&self, order: Ordering) -> bool {
            match self {
                Self::Real(flag) => flag.load(order),
                Self::Followed(flag) => flag.load(order),
            }
        }

        pub(crate) fn store(&self, value: bool, order: Ordering) {
            match self {
                Self::Real(flag) => flag.store(value, order),
                Self::Followed(flag) => flag.store(value, order),
            }
        }

        pub(crate) fn swap(&self, value: bool, order: Ordering) -> bool {
            match self {
                Self::Real(flag) => flag.swap(value, order),
                Self::Followed(flag) => flag.swap(value, order),
            }
        }
    }

    impl Default for AtomicBool {
        fn default() -> Self {
            Self::new(false)
        }
    }
}

/// Checks all orders in which threads can run.
#[cfg(test)]
pub(crate) mod model {
    use std::cell::Cell;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    pub(crate) use loom::thread::JoinHandle;

    /// Maximum number of preemptions of threads in one run. Most races need one or two.
    const PREEMPTIONS_MAX: usize = 3;
    /// Uses of locks and flags in one run; more indicate an endless loop.
    const STEPS_MAX: usize = 10_000;
    /// Stack of each thread of a model, in words. loom's default is too small for code that is not optimised.
    const STACK_WORDS: usize = 64 * 1024;

    thread_local! {
        // loom runs all threads of a model on one OS thread.
        static INSIDE: Cell<bool> = const { Cell::new(false) };
    }

    pub(super) fn is_inside() -> bool {
        INSIDE.get()
    }

    /// Runs `body` once for each order in which its threads can use their shared state. Panics in the first run that panics
    /// or does not end.
    pub(crate) fn check(body: impl Fn() + Send + Sync + 'static) {
        struct Outside;
        impl Drop for Outside {
            fn drop(&mut self) {
                INSIDE.set(false);
            }
        }
        INSIDE.set(true);
        let _outside = Outside;
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(PREEMPTIONS_MAX);
        builder.max_branches = STEPS_MAX;
        let body = Arc::new(body);
        let runs = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&runs);
        builder.check(move || {
            counted.fetch_add(1, Ordering::Relaxed);
            let body = Arc::clone(&body);
            spawn(move || body()).join().expect("the run is over with a panic");
        });
        // A single order shows nothing about threads.
        let runs = runs.load(Ordering::Relaxed);
        assert!(runs > 1, "nothing that the threads share is followed");
        println!("{runs} orders");
    }

    /// Starts a thread of a model; at most three besides the body's.
    pub(crate) fn spawn<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
        loom::thread::Builder::new().stack_size(STACK_WORDS).spawn(body).expect("a thread of a model")
    }
}
