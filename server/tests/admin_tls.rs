//! The admin API over mutual TLS: a real daemon, real certificates, and clients that should and should not get access.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_proto::admin as api;
use forebay_proto::admin::admin_client::AdminClient;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, SanType,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConfig, RootCertStore, SupportedProtocolVersion};
use support::{Daemon, Place, request, until};
use tokio::io::AsyncReadExt;
use tonic::transport::{Channel, Endpoint};

const SERVER: &str = "forebay-0.forebay-system.svc";

struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

struct Issued {
    certificate: String,
    key: String,
}

/// When a certificate is valid.
#[derive(Clone, Copy, PartialEq)]
enum Time {
    Now,
    Past,
}

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    fn issue(&self, common: &str, names: Vec<SanType>, time: Time) -> Issued {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, common);
        params.subject_alt_names = names;
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        if time == Time::Past {
            params.not_before = rcgen::date_time_ymd(2020, 1, 1);
            params.not_after = rcgen::date_time_ymd(2020, 2, 1);
        }
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap().pem();
        Issued { certificate, key: key.serialize_pem() }
    }

    fn named(&self, name: &str) -> Issued {
        self.issue(name, vec![dns(name)], Time::Now)
    }
}

fn dns(name: &str) -> SanType {
    SanType::DnsName(name.try_into().unwrap())
}

/// A daemon's place with the files of a mounted Secret, swapped like kubelet does it.
struct Site {
    place: Place,
    generation: u32,
}

impl Site {
    fn new(ca: &Authority, server: &Issued) -> Self {
        let place = Place::new("readiness");
        let tls = place.scratch.path().join("tls");
        std::fs::create_dir(&tls).unwrap();
        let mut config = std::fs::read_to_string(place.config()).unwrap();
        let lines = format!(
            "[admin]\nlisten = \"127.0.0.1:0\"\ncertificate = \"{0}/tls.crt\"\nkey = \"{0}/tls.key\"\nclient_ca = \"{0}/ca.crt\"\n",
            tls.display()
        );
        config = config.replace("[admin]\n", &lines);
        config += "[instance]\nname = \"forebay-0\"\nepoch = 7\n";
        std::fs::write(place.config(), config).unwrap();
        let mut site = Self { place, generation: 0 };
        site.mount(&ca.pem, server);
        for name in ["tls.crt", "tls.key", "ca.crt"] {
            std::os::unix::fs::symlink(Path::new("..data").join(name), tls.join(name)).unwrap();
        }
        site
    }

    /// Installs a new generation of the Secret by renaming one symbolic link.
    fn mount(&mut self, ca: &str, server: &Issued) {
        let tls = self.place.scratch.path().join("tls");
        self.generation += 1;
        let name = format!("..{}", self.generation);
        let folder: PathBuf = tls.join(&name);
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("tls.crt"), &server.certificate).unwrap();
        std::fs::write(folder.join("tls.key"), &server.key).unwrap();
        std::fs::write(folder.join("ca.crt"), ca).unwrap();
        std::os::unix::fs::symlink(&name, tls.join("..data_tmp")).unwrap();
        std::fs::rename(tls.join("..data_tmp"), tls.join("..data")).unwrap();
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.place.log()).unwrap()
    }

    /// The address on which the admin API listens, from the log.
    fn address(&self) -> SocketAddr {
        let line = until("the line that says where", || {
            self.log()
                .lines()
                .find(|line| line.contains("\"serving\"") && line.contains("admin_tls"))
                .map(str::to_owned)
        });
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        let text = value["admin_tls"].as_str().unwrap();
        text.trim_start_matches("Some(").trim_end_matches(')').parse().unwrap()
    }
}

fn client_config(
    ca: &Authority,
    identity: Option<&Issued>,
    version: &'static SupportedProtocolVersion,
) -> ClientConfig {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca.pem.as_bytes()).unwrap()).unwrap();
    let builder = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[version])
        .unwrap()
        .with_root_certificates(roots);
    let mut config = match identity {
        None => builder.with_no_client_auth(),
        Some(issued) => {
            let chain = vec![CertificateDer::from_pem_slice(issued.certificate.as_bytes()).unwrap()];
            let key = PrivateKeyDer::from_pem_slice(issued.key.as_bytes()).unwrap();
            builder.with_client_auth_cert(chain, key).unwrap()
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    config
}

async fn connect(address: SocketAddr, config: ClientConfig) -> Result<AdminClient<Channel>, String> {
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let connect = tower::service_fn(move |_| {
        let connector = connector.clone();
        async move {
            let stream = tokio::net::TcpStream::connect(address).await?;
            let stream = connector.connect(ServerName::try_from(SERVER).unwrap(), stream).await?;
            std::io::Result::Ok(hyper_util::rt::TokioIo::new(stream))
        }
    });
    let channel = Endpoint::from_static("http://forebay").connect_with_connector(connect).await;
    channel.map(AdminClient::new).map_err(|error| format!("{error:?}"))
}

/// Makes one call, with TLS 1.3 on a new connection. Returns the error, if any, as one line.
fn ask(
    daemon: &Daemon,
    address: SocketAddr,
    config: ClientConfig,
) -> Result<api::GetServerInfoResponse, String> {
    daemon.runtime.block_on(async {
        let mut client = connect(address, config).await?;
        let answer = client.get_server_info(api::GetServerInfoRequest {}).await;
        answer.map(tonic::Response::into_inner).map_err(|status| format!("{status:?}"))
    })
}

/// The server's answer to a client that it refuses, or `None` if it accepts the client. In TLS 1.3 a client's handshake
/// completes before the server checks its certificate: the alert arrives in place of the first data.
fn refusal(daemon: &Daemon, address: SocketAddr, config: ClientConfig) -> Option<String> {
    daemon.runtime.block_on(async {
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        let stream = tokio::net::TcpStream::connect(address).await.unwrap();
        match connector.connect(ServerName::try_from(SERVER).unwrap(), stream).await {
            Ok(mut stream) => stream.read_u8().await.err().map(|error| error.to_string()),
            Err(error) => Some(error.to_string()),
        }
    })
}

#[test]
fn clients_are_authorized_by_the_name_in_their_certificate() {
    let (ca, other) = (Authority::new("ours"), Authority::new("theirs"));
    let site = Site::new(&ca, &ca.named(SERVER));
    let daemon = site.place.start();
    let address = site.address();
    let uri = SanType::URI("spiffe://cluster.local/x".try_into().unwrap());
    let good = [
        ca.named("forebay-operator"),
        ca.issue("something else", vec![dns("x.example"), dns("forebay-csi")], Time::Now),
        ca.issue("forebay-csi", vec![], Time::Now),
    ];
    for identity in &good {
        let info = ask(&daemon, address, client_config(&ca, Some(identity), &TLS13)).unwrap();
        assert_eq!((info.instance_name.as_str(), info.instance_epoch), ("forebay-0", 7));
        assert_eq!(info.transports, ["tcp"]);
        assert!(info.problems.is_empty() && !info.draining);
    }
    let bad = [
        (None, "CertificateRequired"),
        (Some(other.named("forebay-operator")), "UnknownCA"),
        (Some(ca.issue("mallory", vec![dns("forebay-operator.example"), uri], Time::Now)), "AccessDenied"),
        (Some(ca.issue("forebay-operator", vec![dns("forebay-operator")], Time::Past)), "CertificateExpired"),
    ];
    for (identity, alert) in &bad {
        let config = client_config(&ca, identity.as_ref(), &TLS13);
        assert!(ask(&daemon, address, config.clone()).is_err());
        let error = refusal(&daemon, address, config).unwrap();
        assert!(error.contains(alert), "{alert} is not in {error}");
    }
    assert_eq!(refusal(&daemon, address, client_config(&ca, Some(&good[0]), &TLS13)), None);
    let old = refusal(&daemon, address, client_config(&ca, Some(&good[0]), &TLS12)).unwrap();
    assert!(old.contains("ProtocolVersion"), "{old}");
    let refused = site.log();
    assert!(refused.contains("\\\"mallory\\\"") && refused.contains("none of which"), "{refused}");
}

#[test]
fn plaintext_connections_are_refused() {
    let ca = Authority::new("ours");
    let site = Site::new(&ca, &ca.named(SERVER));
    let daemon = site.place.start();
    let address = site.address();
    let answer = daemon.runtime.block_on(async {
        let channel = Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await;
        match channel {
            Ok(channel) => AdminClient::new(channel)
                .get_server_info(api::GetServerInfoRequest {})
                .await
                .map(drop)
                .map_err(drop),
            Err(_) => Err(()),
        }
    });
    assert!(answer.is_err());
}

#[test]
fn certificates_are_reloaded_without_disconnecting_clients() {
    let (first, second) = (Authority::new("first"), Authority::new("second"));
    let mut site = Site::new(&first, &first.named(SERVER));
    let mut daemon = site.place.start();
    let address = site.address();
    let old = first.named("forebay-operator");
    let mut live =
        daemon.runtime.block_on(connect(address, client_config(&first, Some(&old), &TLS13))).unwrap();
    let mut ask_live = |daemon: &Daemon| {
        let answer = daemon.runtime.block_on(live.get_server_info(api::GetServerInfoRequest {}));
        answer.map(tonic::Response::into_inner)
    };
    assert!(ask_live(&daemon).is_ok());

    // The server does not apply half of a rotation, and reports it.
    let torn = Issued { certificate: second.named(SERVER).certificate, key: second.named(SERVER).key };
    site.mount(&second.pem, &torn);
    let problems = until("the problem", || {
        let info = ask_live(&daemon).unwrap();
        (!info.problems.is_empty()).then_some(info.problems)
    });
    assert!(problems[0].contains("admin.key"), "{problems:?}");
    assert!(ask(&daemon, address, client_config(&first, Some(&old), &TLS13)).is_ok());

    // While the authority changes, the server accepts certificates of both.
    let new = second.named("forebay-operator");
    site.mount(&format!("{}{}", first.pem, second.pem), &second.named(SERVER));
    until("the new certificate", || ask(&daemon, address, client_config(&second, Some(&new), &TLS13)).ok());
    assert!(ask(&daemon, address, client_config(&second, Some(&old), &TLS13)).is_ok());
    assert!(ask_live(&daemon).unwrap().problems.is_empty());

    site.mount(&second.pem, &second.named(SERVER));
    let error = until("the end of the old authority", || {
        refusal(&daemon, address, client_config(&second, Some(&old), &TLS13))
    });
    assert!(error.contains("UnknownCA"), "{error}");
    assert!(ask(&daemon, address, client_config(&second, Some(&new), &TLS13)).is_ok());
    // The connection from before the rotation continues.
    assert!(ask_live(&daemon).is_ok());
    assert!(daemon.create_volume("v").is_ok(), "and so does the socket");
    assert!(!site.log().contains("PRIVATE KEY"));
}

#[test]
fn server_with_unusable_certificates_does_not_start() {
    let ca = Authority::new("ours");
    let right = ca.named(SERVER);
    let site = Site::new(&ca, &Issued { certificate: right.certificate.clone(), key: ca.named(SERVER).key });
    let (code, said) = site.place.fails();
    assert_eq!(code, 3, "{said}");
    assert!(said.contains("admin.key: ") && said.contains("tls.key"), "{said}");
    let site = Site::new(&ca, &Issued { certificate: "nothing".to_owned(), key: right.key });
    let (code, said) = site.place.fails();
    assert_eq!(code, 3, "{said}");
    assert!(said.contains("admin.certificate: ") && said.contains("no certificate in it"), "{said}");
}

#[test]
fn volume_created_over_tls_is_listed_on_the_socket() {
    let ca = Authority::new("ours");
    let site = Site::new(&ca, &ca.named(SERVER));
    let mut daemon = site.place.start();
    let identity = ca.named("forebay-csi");
    let config = client_config(&ca, Some(&identity), &TLS13);
    let made = daemon
        .runtime
        .block_on(async { connect(site.address(), config).await.unwrap().create_volume(request("v")).await });
    made.unwrap();
    let listed =
        daemon.admin(async |admin| admin.list_volumes(api::ListVolumesRequest::default()).await).unwrap();
    assert_eq!(listed.into_inner().volumes.len(), 1);
}
