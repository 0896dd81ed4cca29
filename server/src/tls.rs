//! Mutual TLS for the admin API: TLS 1.3, clients identified by their certificates, files reloaded while the server runs.

use std::collections::VecDeque;
use std::fmt::{Display, Write as _};
use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, PoisonError, RwLock};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, RootCertStore, ServerConfig, SignatureScheme,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::AbortHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;
use tracing::{debug, error, info, warn};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};
use zeroize::Zeroizing;

use crate::config::AdminSection;
use crate::limits::{
    ADMIN_CONNECTIONS_MAX, ADMIN_HANDSHAKE_TIME_MAX, ADMIN_HANDSHAKES_MAX, CERTIFICATE_BYTES_MAX,
    CERTIFICATES_REFRESH,
};

/// Why the files do not make a TLS configuration.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("{option}: {path}: {error}")]
    Read {
        /// Of the configuration.
        option: &'static str,
        /// Of the file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// The content of a file is invalid.
    #[error("{option}: {path}: {problem}")]
    Content {
        /// Of the configuration.
        option: &'static str,
        /// Of the file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

/// The contents of the files when they were read.
#[derive(PartialEq, Eq)]
struct Files {
    certificate: Vec<u8>,
    key: Zeroizing<Vec<u8>>,
    client_ca: Vec<u8>,
}

/// The parsed files.
#[derive(Clone)]
struct Loaded {
    config: Arc<ServerConfig>,
    about: About,
}

/// The server's certificate, as reported to people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct About {
    /// Names for which it is valid.
    pub names: Vec<String>,
    /// Unix time of its expiry.
    pub not_after: i64,
}

/// The admin API's certificates, reloaded from their files.
pub struct Certificates {
    options: AdminSection,
    files: RwLock<Option<Files>>,
    loaded: RwLock<Loaded>,
    /// Why the current files are not in use.
    problem: RwLock<Option<String>>,
}

impl std::fmt::Debug for Certificates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Certificates").field("about", &self.about()).finish_non_exhaustive()
    }
}

impl Certificates {
    /// Reads the files that `options` names.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn load(options: &AdminSection) -> Result<Self, TlsError> {
        let files = Files::read(options)?;
        let loaded = files.load(options)?;
        Ok(Self {
            options: options.clone(),
            files: RwLock::new(Some(files)),
            loaded: RwLock::new(loaded),
            problem: RwLock::default(),
        })
    }

    /// The server's certificate.
    #[must_use]
    pub fn about(&self) -> About {
        self.loaded.read().unwrap_or_else(PoisonError::into_inner).about.clone()
    }

    /// The current problem, if any: an expired certificate, or files that could not be loaded.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        if self.about().not_after < now.cast_signed() {
            return Some("the admin API's certificate has run out".to_owned());
        }
        self.problem.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.loaded.read().unwrap_or_else(PoisonError::into_inner).config)
    }

    /// Checks the files; new contents apply to the next connection. Files that do not match each other (in the middle of a
    /// rotation) leave the previous ones in use.
    pub fn refresh(&self) {
        let result = Files::read(&self.options).and_then(|files| {
            let same = self.files.read().unwrap_or_else(PoisonError::into_inner).as_ref() == Some(&files);
            if same { Ok(None) } else { files.load(&self.options).map(|loaded| Some((files, loaded))) }
        });
        let problem = match result {
            Ok(None) => None,
            Ok(Some((files, loaded))) => {
                info!(names = ?loaded.about.names, not_after = loaded.about.not_after, "admin API: certificates renewed");
                *self.loaded.write().unwrap_or_else(PoisonError::into_inner) = loaded;
                *self.files.write().unwrap_or_else(PoisonError::into_inner) = Some(files);
                None
            }
            Err(error) => Some(format!("the admin API's new certificates are not in use: {error}")),
        };
        let mut shown = self.problem.write().unwrap_or_else(PoisonError::into_inner);
        if *shown != problem {
            if let Some(problem) = &problem {
                error!(problem, "admin API: still using the certificates from before");
            }
            *shown = problem;
        }
    }

    /// Checks the files periodically.
    pub async fn keep_fresh(self: Arc<Self>) {
        let mut tick = tokio::time::interval(CERTIFICATES_REFRESH);
        loop {
            tick.tick().await;
            let this = Arc::clone(&self);
            if tokio::task::spawn_blocking(move || this.refresh()).await.is_err() {
                error!("looking at the admin API's certificates panicked");
            }
        }
    }
}

impl Files {
    fn read(options: &AdminSection) -> Result<Self, TlsError> {
        Ok(Self {
            certificate: read("admin.certificate", &options.certificate)?.to_vec(),
            key: read("admin.key", &options.key)?,
            client_ca: read("admin.client_ca", &options.client_ca)?.to_vec(),
        })
    }

    fn load(&self, options: &AdminSection) -> Result<Loaded, TlsError> {
        let wrong_certificate = |problem| wrong("admin.certificate", &options.certificate, &problem);
        let wrong_key = |error| wrong("admin.key", &options.key, &error);
        let wrong_ca = |problem: &dyn Display| wrong("admin.client_ca", &options.client_ca, problem);
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());

        let chain = certificates(&self.certificate).map_err(wrong_certificate)?;
        let about = about(&chain[0]).map_err(wrong_certificate)?;
        let key = PrivateKeyDer::from_pem_slice(&self.key).map_err(|error| wrong_key(error.to_string()))?;
        // Also refuses a key that does not match the certificate.
        let certified =
            CertifiedKey::from_der(chain, key, &provider).map_err(|error| wrong_key(error.to_string()))?;

        let mut authorities = RootCertStore::empty();
        for certificate in certificates(&self.client_ca).map_err(|problem| wrong_ca(&problem))? {
            authorities.add(certificate).map_err(|error| wrong_ca(&error))?;
        }
        let chained =
            WebPkiClientVerifier::builder_with_provider(Arc::new(authorities), Arc::clone(&provider))
                .build()
                .map_err(|error| wrong_ca(&error))?;
        let verifier = Allowed { chained, clients: options.allowed_clients.clone() };
        Ok(Loaded { config: Arc::new(server_config(provider, verifier, certified)), about })
    }
}

fn server_config(provider: Arc<CryptoProvider>, verifier: Allowed, certified: CertifiedKey) -> ServerConfig {
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("the provider has suites of TLS 1.3")
        .with_client_cert_verifier(Arc::new(verifier))
        .with_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from(certified)));
    config.alpn_protocols = vec![b"h2".to_vec()];
    // A resumed session would skip the check of the client's certificate, which may have expired since.
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    config
}

fn wrong(option: &'static str, path: &Path, problem: &dyn Display) -> TlsError {
    TlsError::Content { option, path: path.to_owned(), problem: problem.to_string() }
}

fn read(option: &'static str, path: &Path) -> Result<Zeroizing<Vec<u8>>, TlsError> {
    let mut bytes = Zeroizing::new(Vec::new());
    let result =
        std::fs::File::open(path).and_then(|file| file.take(CERTIFICATE_BYTES_MAX).read_to_end(&mut bytes));
    result.map_err(|error| TlsError::Read { option, path: path.to_owned(), error })?;
    Ok(bytes)
}

/// Parses at least one certificate.
fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Vec<_> =
        CertificateDer::pem_slice_iter(pem).collect::<Result<_, _>>().map_err(|e| e.to_string())?;
    if found.is_empty() { Err("there is no certificate in it".to_owned()) } else { Ok(found) }
}

fn about(certificate: &CertificateDer<'_>) -> Result<About, String> {
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(|error| error.to_string())?;
    Ok(About { names: names(&parsed), not_after: parsed.validity().not_after.timestamp() })
}

/// DNS and URI names, and the common name: they identify the subject of the certificate.
fn names(certificate: &X509Certificate<'_>) -> Vec<String> {
    let alternative = certificate.subject_alternative_name().ok().flatten();
    let alternative = alternative.iter().flat_map(|extension| &extension.value.general_names);
    let mut found: Vec<String> = alternative
        .filter_map(|name| match name {
            GeneralName::DNSName(name) | GeneralName::URI(name) => Some((*name).to_owned()),
            _ => None,
        })
        .collect();
    let common = certificate.subject().iter_common_name().filter_map(|name| name.as_str().ok());
    for name in common {
        if !found.iter().any(|known| known == name) {
            found.push(name.to_owned());
        }
    }
    found
}

fn client_name<'a>(certificate: &CertificateDer<'_>, allowed: &'a [String]) -> Result<&'a str, String> {
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(|error| error.to_string())?;
    let names = names(&parsed);
    let found = allowed.iter().find(|name| names.contains(name));
    found.map(String::as_str).ok_or_else(|| {
        let mut text = "it is of ".to_owned();
        for name in &names {
            let _ = write!(text, "{name:?}, ");
        }
        text + "none of which admin.allowed_clients has"
    })
}

/// Accepts certificates of the authorities, but only for the clients that are allowed by name.
#[derive(Debug)]
struct Allowed {
    chained: Arc<dyn ClientCertVerifier>,
    clients: Vec<String>,
}

impl ClientCertVerifier for Allowed {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.chained.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.chained.verify_client_cert(end_entity, intermediates, now)?;
        match client_name(end_entity, &self.clients) {
            Ok(_) => Ok(verified),
            Err(problem) => {
                warn!(problem, "admin API: a client's certificate is refused");
                // The client gets "access denied".
                Err(CertificateError::ApplicationVerificationFailure.into())
            }
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.chained.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.chained.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chained.supported_verify_schemes()
    }
}

/// A client of the admin API behind TLS.
pub struct AdminStream {
    stream: TlsStream<TcpStream>,
    client: Arc<str>,
    _permit: OwnedSemaphorePermit,
}

/// The client that sent a request.
#[derive(Clone, Debug)]
pub struct AdminClientName(pub Arc<str>);

impl Connected for AdminStream {
    type ConnectInfo = AdminClientName;

    fn connect_info(&self) -> AdminClientName {
        AdminClientName(Arc::clone(&self.client))
    }
}

impl AsyncRead for AdminStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for AdminStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Accepts connections and runs their TLS handshakes, up to a limit; connections with a failed handshake are closed. Any
/// client that can reach the port can begin a handshake, so clients that do nothing else must make room for others.
pub(crate) fn accept(
    listener: TcpListener,
    certificates: Arc<Certificates>,
) -> mpsc::Receiver<std::io::Result<AdminStream>> {
    accept_within(listener, certificates, ADMIN_HANDSHAKE_TIME_MAX)
}

fn accept_within(
    listener: TcpListener,
    certificates: Arc<Certificates>,
    handshake_time_max: Duration,
) -> mpsc::Receiver<std::io::Result<AdminStream>> {
    // Capacity for one connection: those that wait have completed their handshake and hold their permit.
    let (sender, receiver) = mpsc::channel(1);
    let permits = Arc::new(Semaphore::new(ADMIN_CONNECTIONS_MAX));
    tokio::spawn(async move {
        let mut shaking: VecDeque<AbortHandle> = VecDeque::new();
        loop {
            let (stream, peer) = tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        warn!(%error, "admin API: accepting a connection");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                        continue;
                    }
                },
                () = sender.closed() => return,
            };
            shaking.retain(|handshake| !handshake.is_finished());
            if shaking.len() >= ADMIN_HANDSHAKES_MAX
                && let Some(oldest) = shaking.pop_front()
            {
                debug!("admin API: too many TLS handshakes at once, the oldest is given up");
                oldest.abort();
            }
            let acceptor = TlsAcceptor::from(certificates.config());
            let allowed = certificates.options.allowed_clients.clone();
            let (sender, permits) = (sender.clone(), Arc::clone(&permits));
            let handshake = tokio::spawn(async move {
                let shaken = tokio::time::timeout(handshake_time_max, shake(acceptor, stream, &allowed));
                match shaken.await {
                    Ok(Ok((stream, client))) => match permits.try_acquire_owned() {
                        Ok(permit) => {
                            debug!(%peer, %client, "admin API: connected");
                            let stream = AdminStream { stream, client, _permit: permit };
                            // On a separate task, because this task can be cancelled.
                            tokio::spawn(async move { sender.send(Ok(stream)).await });
                        }
                        Err(_) => {
                            warn!(%peer, %client, "admin API: too many connections, one more is closed")
                        }
                    },
                    Ok(Err(error)) => refused(peer, &error),
                    Err(_) => debug!(%peer, "admin API: no TLS handshake in time"),
                }
            });
            shaking.push_back(handshake.abort_handle());
        }
    });
    receiver
}

fn refused(peer: SocketAddr, error: &std::io::Error) {
    let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
    match error.kind() {
        // A client that only checks whether the port is open.
        std::io::ErrorKind::UnexpectedEof | std::io::ErrorKind::ConnectionReset => {
            debug!(%peer, %error, "admin API: connection refused");
        }
        _ => warn!(%peer, %error, "admin API: connection refused"),
    }
}

async fn shake(
    acceptor: TlsAcceptor,
    stream: TcpStream,
    allowed: &[String],
) -> std::io::Result<(TlsStream<TcpStream>, Arc<str>)> {
    stream.set_nodelay(true)?;
    let stream = acceptor.accept(stream).await?;
    let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
    let certificate = certificate.ok_or_else(|| std::io::Error::other("no certificate"))?;
    let client = client_name(certificate, allowed).map_err(std::io::Error::other)?.into();
    Ok((stream, client))
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, KeyPair};
    use rustls::ClientConfig;
    use rustls::pki_types::ServerName;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio_rustls::TlsConnector;

    use super::*;

    const NAME: &str = "one-for-both.example";

    /// A self-signed certificate that is server, client and authority in one; and the client's configuration.
    fn identity(folder: &Path) -> (Certificates, ClientConfig) {
        let mut params = CertificateParams::new(vec![NAME.to_owned()]).expect("a name");
        params.distinguished_name.push(DnType::CommonName, NAME);
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let authority_key = KeyPair::generate().expect("a key");
        let authority = params.self_signed(&authority_key).expect("signed");
        let issuer = rcgen::Issuer::new(params, authority_key);
        let leaf = CertificateParams::new(vec![NAME.to_owned()]).expect("a name");
        let key = KeyPair::generate().expect("a key");
        let leaf = leaf.signed_by(&key, &issuer).expect("signed");
        for (name, text) in
            [("tls.crt", leaf.pem()), ("tls.key", key.serialize_pem()), ("ca.crt", authority.pem())]
        {
            std::fs::write(folder.join(name), text).expect("written");
        }
        let options = AdminSection {
            certificate: folder.join("tls.crt"),
            key: folder.join("tls.key"),
            client_ca: folder.join("ca.crt"),
            allowed_clients: vec![NAME.to_owned()],
            ..AdminSection::default()
        };
        let mut roots = RootCertStore::empty();
        roots.add(authority.der().clone()).expect("an authority");
        let client =
            ClientConfig::builder_with_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
                .with_protocol_versions(&[&rustls::version::TLS13])
                .expect("TLS 1.3")
                .with_root_certificates(roots)
                .with_client_auth_cert(
                    vec![leaf.der().clone()],
                    PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes()).expect("a key"),
                )
                .expect("a client");
        (Certificates::load(&options).expect("loaded"), client)
    }

    #[tokio::test]
    async fn silent_peers_do_not_exclude_authenticated_clients() {
        let scratch = tempfile::tempdir().expect("a directory");
        let (certificates, client) = identity(scratch.path());
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        // No peer is closed for being slow here.
        let hour = Duration::from_secs(3600);
        let mut accepted = accept_within(listener, Arc::new(certificates), hour);
        let mut silent = Vec::new();
        for _ in 0..=ADMIN_CONNECTIONS_MAX + ADMIN_HANDSHAKES_MAX {
            silent.push(TcpStream::connect(address).await.expect("connected"));
        }
        let deadline = Duration::from_secs(60);
        let connector = TlsConnector::from(Arc::new(client));
        let connect = async {
            let stream = TcpStream::connect(address).await?;
            connector.connect(ServerName::try_from(NAME).expect("a name"), stream).await
        };
        let mut stream = tokio::time::timeout(deadline, connect).await.expect("in time").expect("accepted");
        let mut served = accepted.recv().await.expect("the server accepts connections").expect("a stream");
        assert_eq!(&*served.connect_info().0, NAME);
        // More silent peers do not close the connection of a known client.
        for _ in 0..=ADMIN_HANDSHAKES_MAX {
            silent.push(TcpStream::connect(address).await.expect("connected"));
        }
        let mut last = TcpStream::connect(address).await.expect("connected");
        let first = &mut silent[0];
        assert_eq!(first.read(&mut [0]).await.expect("closed orderly"), 0, "the oldest made room");
        stream.write_all(b"x").await.expect("sent");
        assert_eq!(served.read_u8().await.expect("received"), b'x');
        assert!(last.try_read(&mut [0]).is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock));
        last.shutdown().await.expect("closed");
    }
}
