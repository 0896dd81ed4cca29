//! Writes one log line per call: the RPC, the volume, the outcome and the duration. Never logs contents: requests hold secrets,
//! and mount flags may.

use std::time::Instant;

use tonic::{Code, Response, Status};
use tracing::{debug, info, warn};

use crate::error::Error;

/// Runs a call, turns its outcome into gRPC's, and logs it.
pub(crate) async fn observe<T>(
    rpc: &'static str,
    volume_id: &str,
    call: impl Future<Output = Result<T, Error>>,
) -> Result<Response<T>, Status> {
    let started = Instant::now();
    debug!(rpc, volume_id, "call begins");
    let result = call.await.map_err(Status::from);
    let elapsed_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
    match &result {
        Ok(_) => info!(rpc, volume_id, elapsed_ms, "call succeeded"),
        // The orchestrator retries.
        Err(status) if status.code() == Code::Aborted => {
            debug!(rpc, volume_id, elapsed_ms, code = ?status.code(), error = status.message(), "call refused");
        }
        Err(status) => {
            warn!(rpc, volume_id, elapsed_ms, code = ?status.code(), error = status.message(), "call failed");
        }
    }
    result.map(Response::new)
}
