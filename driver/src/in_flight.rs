//! Allows one call at a time per volume.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::Error;
use crate::limits::IN_FLIGHT_MAX;

/// The volumes with a call in progress.
#[derive(Clone, Debug, Default)]
pub(crate) struct InFlight(Arc<Mutex<HashSet<String>>>);

impl InFlight {
    /// Claims `volume_id` until the claim is dropped, possibly on another thread and long after the caller has given up.
    pub(crate) fn claim(&self, volume_id: &str) -> Result<Claim, Error> {
        // The set is consistent between any two statements, so a panic elsewhere cannot have corrupted it.
        let mut set = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if set.contains(volume_id) {
            return Err(Error::InFlight(volume_id.to_owned()));
        }
        if set.len() >= IN_FLIGHT_MAX {
            return Err(Error::TooManyInFlight);
        }
        set.insert(volume_id.to_owned());
        Ok(Claim { volume_id: volume_id.to_owned(), of: self.clone() })
    }
}

/// The claim of a volume's only call.
#[derive(Debug)]
pub(crate) struct Claim {
    volume_id: String,
    of: InFlight,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.of.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.volume_id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(result: Result<Claim, Error>) -> tonic::Code {
        result.map_or_else(|e| tonic::Status::from(e).code(), |_| tonic::Code::Ok)
    }

    #[test]
    fn a_second_call_for_a_volume_is_aborted_until_the_first_ends() {
        let in_flight = InFlight::default();
        let first = in_flight.claim("a").expect("free");
        assert_eq!(code(in_flight.claim("a")), tonic::Code::Aborted);
        assert_eq!(code(in_flight.claim("b")), tonic::Code::Ok);
        std::thread::spawn(move || drop(first)).join().expect("no panic");
        assert_eq!(code(in_flight.claim("a")), tonic::Code::Ok);
    }

    #[test]
    fn number_of_calls_in_flight_is_bounded() {
        let in_flight = InFlight::default();
        let claims: Vec<_> =
            (0..IN_FLIGHT_MAX).map(|i| in_flight.claim(&i.to_string()).expect("room")).collect();
        let error = in_flight.claim("more").expect_err("no room");
        assert!(!error.is_final(), "the caller may retry");
        assert_eq!(tonic::Status::from(error).code(), tonic::Code::Unavailable);
        drop(claims);
        assert_eq!(code(in_flight.claim("more")), tonic::Code::Ok);
    }
}
