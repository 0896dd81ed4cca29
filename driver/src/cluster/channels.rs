//! Connections to the instances' admin APIs: mutual TLS with the client certificate that the operator stores in a Secret.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use forebay_api::names;
use k8s_openapi::api::core::v1::Secret;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};
use tracing::{info, warn};

use super::Kubernetes;
use crate::admin::Admin;
use crate::error::Error;
use crate::handle::InstanceName;
use crate::limits::{
    CERTIFICATE_FRESH, CHANNELS_MAX, KEEP_ALIVE_INTERVAL, KEEP_ALIVE_TIMEOUT, PROBE_DEADLINE,
};

/// Open channels, and the certificates that they were opened with.
#[derive(Clone, Default)]
pub(crate) struct Channels(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    certificates: HashMap<String, Known>,
    channels: HashMap<InstanceName, Channel>,
}

#[derive(Clone)]
struct Known {
    certificate: Arc<ClientCertificate>,
    read: Instant,
}

struct Channel {
    endpoint: String,
    version: String,
    admin: Admin,
}

/// The contents of `<cluster>-csi-tls`.
struct ClientCertificate {
    /// Differs for another Secret or other contents.
    version: String,
    chain: Vec<u8>,
    key: Vec<u8>,
    /// Contains both CAs while one is being replaced.
    authority: Vec<u8>,
}

impl std::fmt::Debug for Channels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Channels")
    }
}

impl Channels {
    /// The channel to this instance, reopened if its address or the certificate has changed. Calls in progress on the old one
    /// finish there.
    pub(super) async fn to(
        &self,
        kubernetes: &Kubernetes,
        instance: &InstanceName,
        endpoint: &str,
    ) -> Result<Admin, Error> {
        // A call may have failed in transit because of an old certificate.
        let is_doubted = {
            let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let channel = state.channels.get(instance);
            channel.is_some_and(|channel| channel.admin.has_failed().swap(false, Ordering::Relaxed))
        };
        let certificate = self.certificate(kubernetes, instance.cluster(), is_doubted).await?;
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(channel) = state.channels.get(instance)
            && channel.endpoint == endpoint
            && channel.version == certificate.version
        {
            return Ok(channel.admin.clone());
        }
        let admin = open(kubernetes, instance, endpoint, &certificate)?;
        if state.channels.len() >= CHANNELS_MAX {
            state.channels.clear();
        }
        let channel = Channel {
            endpoint: endpoint.to_owned(),
            version: certificate.version.clone(),
            admin: admin.clone(),
        };
        state.channels.insert(instance.clone(), channel);
        Ok(admin)
    }

    /// The cluster's client certificate, rarely older than [`CERTIFICATE_FRESH`]. Falls back to the old one if the new one
    /// cannot be read.
    async fn certificate(
        &self,
        kubernetes: &Kubernetes,
        cluster: &str,
        is_doubted: bool,
    ) -> Result<Arc<ClientCertificate>, Error> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).certificates.get(cluster).cloned();
        if let Some(known) = &known
            && !is_doubted
            && known.read.elapsed() < CERTIFICATE_FRESH
        {
            return Ok(known.certificate.clone());
        }
        let certificate = match (ClientCertificate::read(kubernetes, cluster).await, known) {
            (Ok(certificate), Some(known)) if known.certificate.version == certificate.version => {
                known.certificate
            }
            (Ok(certificate), known) => {
                info!(cluster, again = known.is_some(), "read the client certificate for the admin API");
                Arc::new(certificate)
            }
            (Err(error), Some(known)) => {
                warn!(
                    cluster,
                    error = error.to_string(),
                    "the client certificate cannot be read again, using the old one"
                );
                known.certificate
            }
            (Err(error), None) => return Err(error),
        };
        let known = Known { certificate: certificate.clone(), read: Instant::now() };
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.certificates.len() >= CHANNELS_MAX {
            state.certificates.clear();
        }
        state.certificates.insert(cluster.to_owned(), known);
        Ok(certificate)
    }
}

impl ClientCertificate {
    async fn read(kubernetes: &Kubernetes, cluster: &str) -> Result<Self, Error> {
        let name = names::driver_secret(cluster);
        let Some(secret) = kubernetes.secret(&name).await? else {
            return Err(Error::NotNow(format!(
                "Secret {name} with the certificate for the admin API does not exist yet; the operator creates it"
            )));
        };
        Self::of(&name, secret)
    }

    fn of(name: &str, secret: Secret) -> Result<Self, Error> {
        let mut data = secret.data.unwrap_or_default();
        let mut take = |key: &str| match data.remove(key) {
            Some(value) if !value.0.is_empty() => Ok(value.0),
            _ => Err(Error::NotNow(format!("Secret {name} has no {key}; the operator writes it"))),
        };
        let metadata = secret.metadata;
        let version =
            format!("{}/{}", metadata.uid.unwrap_or_default(), metadata.resource_version.unwrap_or_default());
        Ok(Self {
            chain: take(names::tls::CERTIFICATE)?,
            key: take(names::tls::KEY)?,
            authority: take(names::tls::AUTHORITY)?,
            version,
        })
    }
}

fn open(
    kubernetes: &Kubernetes,
    instance: &InstanceName,
    endpoint: &str,
    certificate: &ClientCertificate,
) -> Result<Admin, Error> {
    let tls = ClientTlsConfig::new()
        // The address in the certificate can become outdated; the name does not.
        .domain_name(names::admin_server_name(instance.as_str(), kubernetes.namespace()))
        .ca_certificate(Certificate::from_pem(&certificate.authority))
        .identity(Identity::from_pem(&certificate.chain, &certificate.key))
        .timeout(PROBE_DEADLINE);
    let unusable = |error: tonic::transport::Error| {
        let what = format!("the admin API of instance {instance} at {endpoint:?} cannot be called");
        Error::NotNow(format!("{what}: {}", crate::error::with_sources(&error)))
    };
    let channel = Endpoint::from_shared(format!("https://{endpoint}"))
        .and_then(|endpoint| endpoint.tls_config(tls))
        .map_err(unusable)?
        .connect_timeout(PROBE_DEADLINE)
        .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        // Otherwise the next call would be the first to detect, and fail because of, a peer that vanished silently between two
        // calls.
        .keep_alive_while_idle(true)
        .connect_lazy();
    Ok(Admin::over(channel, format!("instance {instance}")))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::ByteString;

    use super::*;

    #[test]
    fn incomplete_certificate_secret_returns_unavailable() {
        let secret = |keys: &[&str]| Secret {
            data: Some(keys.iter().map(|k| ((*k).to_owned(), ByteString(b"x".to_vec()))).collect()),
            ..Default::default()
        };
        assert!(ClientCertificate::of("s", secret(&["tls.crt", "tls.key", "ca.crt"])).is_ok());
        for keys in [&["tls.crt", "tls.key"][..], &["tls.crt", "ca.crt"], &["tls.key", "ca.crt"], &[]] {
            let status = tonic::Status::from(
                ClientCertificate::of("s", secret(keys)).err().expect("something is missing"),
            );
            assert_eq!(status.code(), tonic::Code::Unavailable, "{keys:?}");
        }
        let empty = Secret {
            data: Some([("tls.crt".to_owned(), ByteString(Vec::new()))].into()),
            ..Default::default()
        };
        assert!(ClientCertificate::of("s", empty).is_err());
    }
}
