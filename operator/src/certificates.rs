//! The certificates of the admin API: a cluster's own authority, its servers, the operator and the CSI driver.
//!
//! Decides which step is due purely from the current time and the existing certificates. An authority is replaced in steps,
//! so that no peer is ever presented with a certificate that it does not trust yet: the next authority is published, then it
//! signs, then the former one is removed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use forebay_api::names::tls;
use k8s_openapi::ByteString;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PublicKeyData as _, SanType,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use x509_parser::prelude::{FromDer as _, GeneralName, X509Certificate};

/// Key in the authority's Secret: the certificate of the authority that will sign next.
const NEXT_CERTIFICATE: &str = "next.crt";
/// Key in the authority's Secret: its private key.
const NEXT_KEY: &str = "next.key";
/// Key in the authority's Secret: when the current authority replaced another as the signer, in seconds since 1970.
const PROMOTED: &str = "promoted";
/// Certificates are backdated because clocks differ.
const BACKDATE: SignedDuration = SignedDuration::from_mins(5);
/// How long servers and clients have to load a new bundle of authorities. A kubelet updates a changed Secret in its pods
/// within two minutes.
pub const SETTLE: SignedDuration = SignedDuration::from_hours(1);
/// Minimum validity of an authority.
const AUTHORITY_VALIDITY_MIN: SignedDuration = SignedDuration::from_hours(10 * 365 * 24);

/// Why a certificate cannot be made or read.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// The certificate cannot be made.
    #[error("the certificate cannot be created")]
    Make(#[from] rcgen::Error),
    /// A time that certificates cannot represent.
    #[error("the certificate's expiry is too far in the future")]
    Time,
}

/// Validity periods of certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Validity of a certificate.
    pub validity: SignedDuration,
    /// How long before expiry a certificate is replaced.
    pub renew_before: SignedDuration,
}

impl Rule {
    /// Reads the rule from a cluster's spec.
    #[must_use]
    pub fn new(spec: &forebay_api::cluster::Certificates) -> Self {
        let validity = SignedDuration::from_hours(spec.validity_hours.max(1).into());
        // Never zero, and never so long that a new certificate would be due for renewal immediately.
        let renew_before = SignedDuration::from_hours(spec.renew_before_hours.into())
            .clamp(validity / 10, validity - validity / 10);
        Self { validity, renew_before }
    }

    fn authority_validity(self) -> SignedDuration {
        AUTHORITY_VALIDITY_MIN.max(self.validity * 2)
    }

    /// Early enough that no certificate outlives the authority that signed it.
    fn authority_renew_before(self) -> SignedDuration {
        self.validity + SETTLE * 2
    }
}

/// A certificate and its key, PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct Pair {
    /// Certificate.
    pub certificate: String,
    /// Private key.
    pub key: String,
}

impl fmt::Debug for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pair").field("certificate", &self.certificate).finish_non_exhaustive()
    }
}

/// The relevant fields of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Parsed {
    not_before: Timestamp,
    not_after: Timestamp,
    dns: BTreeSet<String>,
    ips: BTreeSet<IpAddr>,
}

fn parse(pem: &str) -> Option<Parsed> {
    let der = CertificateDer::from_pem_slice(pem.as_bytes()).ok()?;
    let (_, certificate) = X509Certificate::from_der(&der).ok()?;
    let mut dns = BTreeSet::new();
    let mut ips = BTreeSet::new();
    let names = certificate.subject_alternative_name().ok()?;
    for name in names.iter().flat_map(|n| &n.value.general_names) {
        match name {
            GeneralName::DNSName(name) => {
                dns.insert((*name).to_owned());
            }
            GeneralName::IPAddress(bytes) => {
                let ip = <[u8; 4]>::try_from(*bytes)
                    .map(IpAddr::from)
                    .or_else(|_| <[u8; 16]>::try_from(*bytes).map(IpAddr::from));
                ips.insert(ip.ok()?);
            }
            _ => {}
        }
    }
    Some(Parsed {
        not_before: Timestamp::from_second(certificate.validity().not_before.timestamp()).ok()?,
        not_after: Timestamp::from_second(certificate.validity().not_after.timestamp()).ok()?,
        dns,
        ips,
    })
}

fn signed_by(pem: &str, authority: &str) -> bool {
    let ders = [pem, authority].map(|p| CertificateDer::from_pem_slice(p.as_bytes()));
    let [Ok(leaf), Ok(authority)] = ders else { return false };
    let (Ok((_, leaf)), Ok((_, authority))) =
        (X509Certificate::from_der(&leaf), X509Certificate::from_der(&authority))
    else {
        return false;
    };
    leaf.verify_signature(Some(authority.public_key())).is_ok()
}

/// A cluster's authority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Authority {
    /// The authority that signs.
    pub current: Pair,
    /// The authority that will sign next. Peers trust it already.
    pub next: Option<Pair>,
    /// Authorities that signed before. Peers still trust them.
    pub former: Vec<String>,
    /// When `current` replaced another authority as the signer.
    pub promoted: Option<Timestamp>,
}

/// The step that is due for an authority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthorityStep {
    /// None.
    Keep,
    /// Create the first authority, or a new one because the existing one is unusable.
    Create,
    /// Publish the next authority.
    AddNext,
    /// Promote the next authority to the signer.
    Promote,
    /// Remove former authorities.
    Forget,
}

type Data = BTreeMap<String, ByteString>;

fn text(data: &Data, key: &str) -> Option<String> {
    String::from_utf8(data.get(key)?.0.clone()).ok().filter(|t| !t.is_empty())
}

/// Splits a bundle into its PEM certificates.
fn split(bundle: &str) -> Vec<String> {
    const END: &str = "-----END CERTIFICATE-----";
    bundle.split_inclusive(END).filter(|p| p.contains(END)).map(|p| format!("{}\n", p.trim())).collect()
}

impl Authority {
    /// Reads the authority from the data of its Secret; returns `None` if that is unusable.
    #[must_use]
    pub fn read(data: &Data) -> Option<Self> {
        let pair = |certificate: &str, key: &str| {
            let pair = Pair { certificate: text(data, certificate)?, key: text(data, key)? };
            let usable = parse(&pair.certificate).is_some() && KeyPair::from_pem(&pair.key).is_ok();
            usable.then_some(pair)
        };
        let current = pair(tls::CERTIFICATE, tls::KEY)?;
        let next = pair(NEXT_CERTIFICATE, NEXT_KEY);
        let known = |pem: &String| {
            pem.trim() == current.certificate.trim()
                || next.as_ref().is_some_and(|n| n.certificate.trim() == pem.trim())
        };
        let mut former = split(&text(data, tls::AUTHORITY).unwrap_or_default());
        former.retain(|pem| !known(pem) && parse(pem).is_some());
        let promoted = text(data, PROMOTED).and_then(|t| Timestamp::from_second(t.parse().ok()?).ok());
        Some(Self { current, next, former, promoted })
    }

    /// Returns the data of the authority's Secret.
    #[must_use]
    pub fn write(&self) -> Data {
        let mut data = Data::new();
        let mut put =
            |key: &str, text: &str| data.insert(key.to_owned(), ByteString(text.as_bytes().to_vec()));
        put(tls::CERTIFICATE, &self.current.certificate);
        put(tls::KEY, &self.current.key);
        put(tls::AUTHORITY, &self.bundle());
        if let Some(next) = &self.next {
            put(NEXT_CERTIFICATE, &next.certificate);
            put(NEXT_KEY, &next.key);
        }
        if let Some(promoted) = self.promoted {
            put(PROMOTED, &promoted.as_second().to_string());
        }
        data
    }

    /// Returns every trusted certificate as PEM.
    #[must_use]
    pub fn bundle(&self) -> String {
        let next = self.next.iter().map(|n| &n.certificate);
        let all = [&self.current.certificate].into_iter().chain(next).chain(&self.former);
        all.map(|pem| format!("{}\n", pem.trim())).collect()
    }

    /// Creates the first authority.
    ///
    /// # Errors
    ///
    /// If a certificate cannot be made.
    pub fn create(cluster: &str, now: Timestamp, rule: Rule) -> Result<Self, CertificateError> {
        Ok(Self {
            current: make_authority(cluster, now, rule)?,
            next: None,
            former: Vec::new(),
            promoted: None,
        })
    }

    /// Returns the authority after a step.
    ///
    /// # Errors
    ///
    /// If a certificate cannot be made.
    pub fn after(
        self,
        step: AuthorityStep,
        cluster: &str,
        now: Timestamp,
        rule: Rule,
    ) -> Result<Self, CertificateError> {
        Ok(match step {
            AuthorityStep::Keep => self,
            AuthorityStep::Create => Self::create(cluster, now, rule)?,
            AuthorityStep::AddNext => Self { next: Some(make_authority(cluster, now, rule)?), ..self },
            AuthorityStep::Promote => match self.next {
                Some(next) => {
                    let former = [vec![self.current.certificate], self.former].concat();
                    Self {
                        current: next,
                        next: None,
                        former,
                        promoted: Timestamp::from_second(now.as_second()).ok(),
                    }
                }
                None => self,
            },
            AuthorityStep::Forget => Self { former: Vec::new(), ..self },
        })
    }

    /// Issues a certificate.
    ///
    /// # Errors
    ///
    /// If the certificate cannot be made.
    pub fn issue(&self, leaf: &Leaf, now: Timestamp, rule: Rule) -> Result<Pair, CertificateError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        let mut name = DistinguishedName::new();
        name.push(DnType::CommonName, leaf.name.clone());
        params.distinguished_name = name;
        for dns in &leaf.dns {
            params.subject_alt_names.push(SanType::DnsName(dns.clone().try_into()?));
        }
        params.subject_alt_names.extend(leaf.ips.iter().map(|ip| SanType::IpAddress(*ip)));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![if leaf.server {
            ExtendedKeyUsagePurpose::ServerAuth
        } else {
            ExtendedKeyUsagePurpose::ClientAuth
        }];
        params.use_authority_key_identifier_extension = true;
        params.not_before = moment(now - BACKDATE)?;
        params.not_after = moment(now + rule.validity)?;
        let issuer =
            Issuer::from_ca_cert_pem(&self.current.certificate, KeyPair::from_pem(&self.current.key)?)?;
        let certificate = params.signed_by(&key, &issuer)?;
        Ok(Pair { certificate: certificate.pem(), key: key.serialize_pem() })
    }
}

fn make_authority(cluster: &str, now: Timestamp, rule: Rule) -> Result<Pair, CertificateError> {
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::default();
    let mut name = DistinguishedName::new();
    // If two authorities had the same name, verifiers would try the wrong one first.
    name.push(DnType::CommonName, format!("Forebay {cluster} {}", now.as_second()));
    params.distinguished_name = name;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.not_before = moment(now - BACKDATE)?;
    params.not_after = moment(now + rule.authority_validity())?;
    let certificate = params.self_signed(&key)?;
    Ok(Pair { certificate: certificate.pem(), key: key.serialize_pem() })
}

fn moment(at: Timestamp) -> Result<time::OffsetDateTime, CertificateError> {
    time::OffsetDateTime::from_unix_timestamp(at.as_second()).map_err(|_| CertificateError::Time)
}

/// Returns the step that is due for an authority. `None` stands for a missing or unusable authority.
#[must_use]
pub fn authority_step(now: Timestamp, rule: Rule, authority: Option<&Authority>) -> AuthorityStep {
    let Some(authority) = authority else { return AuthorityStep::Create };
    let Some(current) = parse(&authority.current.certificate) else { return AuthorityStep::Create };
    if let Some(next) = authority.next.as_ref().and_then(|n| parse(&n.certificate)) {
        let known_for = now.duration_since(next.not_before + BACKDATE);
        return if known_for >= SETTLE || current.not_after <= now {
            AuthorityStep::Promote
        } else {
            AuthorityStep::Keep
        };
    }
    if current.not_after <= now {
        return AuthorityStep::Create;
    }
    if current.not_after.duration_since(now) <= rule.authority_renew_before() {
        return AuthorityStep::AddNext;
    }
    if !authority.former.is_empty() && now >= forgetting(authority, &current) {
        return AuthorityStep::Forget;
    }
    AuthorityStep::Keep
}

/// Returns when the former authorities can be removed. Certificates that the current authority signs need [`SETTLE`] to
/// arrive, counted from when it began to sign, which can be long after it was made.
fn forgetting(authority: &Authority, current: &Parsed) -> Timestamp {
    authority.promoted.unwrap_or(current.not_before + BACKDATE + SETTLE) + SETTLE
}

/// A certificate that must exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// The Secret that holds it.
    pub secret: String,
    /// Common name.
    pub name: String,
    /// DNS names.
    pub dns: BTreeSet<String>,
    /// IP addresses.
    pub ips: BTreeSet<IpAddr>,
    /// Whether it is for a server rather than a client.
    pub server: bool,
    /// Name of the instance, for a server.
    pub instance: Option<String>,
}

/// The step that is due for a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Due {
    /// None until then.
    Keep(Timestamp),
    /// The certificate is valid until then, but the bundle of authorities is out of date.
    Bundle(Timestamp),
    /// Issue a new certificate, for this reason.
    Issue(&'static str),
}

/// The term of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Term {
    /// Name of its Secret.
    pub secret: String,
    /// When it ends.
    pub end: Timestamp,
    /// When it is due for renewal.
    pub renewal: Timestamp,
}

impl Term {
    /// Returns the term of the certificate in a Secret's data, or `None` if the certificate cannot be read.
    #[must_use]
    pub fn of_leaf(secret: &str, rule: Rule, data: &Data) -> Option<Self> {
        let parsed = parse(&text(data, tls::CERTIFICATE)?)?;
        Some(Self { secret: secret.to_owned(), end: parsed.not_after, renewal: renewal(&parsed, rule) })
    }

    /// Returns the term of an authority, or `None` if its certificate cannot be read.
    #[must_use]
    pub fn of_authority(secret: &str, rule: Rule, authority: &Authority) -> Option<Self> {
        let end = parse(&authority.current.certificate)?.not_after;
        Some(Self { secret: secret.to_owned(), end, renewal: end - rule.authority_renew_before() })
    }
}

/// Computes the renewal as if the certificate's validity did not exceed the rule's, so that a shorter validity also applies
/// to existing certificates.
fn renewal(parsed: &Parsed, rule: Rule) -> Timestamp {
    let validity = parsed.not_after.duration_since(parsed.not_before).min(rule.validity + BACKDATE);
    parsed.not_before + validity - rule.renew_before
}

/// Returns the step that is due for a certificate, from the data of its Secret.
#[must_use]
pub fn due(now: Timestamp, rule: Rule, authority: &Authority, leaf: &Leaf, data: Option<&Data>) -> Due {
    let Some(data) = data else { return Due::Issue("it does not exist") };
    let (Some(certificate), Some(key)) = (text(data, tls::CERTIFICATE), text(data, tls::KEY)) else {
        return Due::Issue("it is incomplete");
    };
    let Some(parsed) = parse(&certificate) else { return Due::Issue("it cannot be parsed") };
    if !matches_key(&certificate, &key) {
        return Due::Issue("its key does not match");
    }
    if parsed.dns != leaf.dns || parsed.ips != leaf.ips {
        return Due::Issue("names or addresses have changed");
    }
    if !signed_by(&certificate, &authority.current.certificate) {
        return Due::Issue("the authority has changed");
    }
    let renewal = renewal(&parsed, rule);
    if renewal <= now {
        return Due::Issue("it expires soon");
    }
    if text(data, tls::AUTHORITY).as_deref() == Some(authority.bundle().as_str()) {
        Due::Keep(renewal)
    } else {
        Due::Bundle(renewal)
    }
}

fn matches_key(certificate: &str, key: &str) -> bool {
    let Ok(key) = KeyPair::from_pem(key) else { return false };
    let Ok(der) = CertificateDer::from_pem_slice(certificate.as_bytes()) else { return false };
    X509Certificate::from_der(&der).is_ok_and(|(_, c)| c.public_key().raw == key.subject_public_key_info())
}

/// Returns when the authority's next step is due, if that is known.
#[must_use]
pub fn authority_renewal(rule: Rule, authority: &Authority) -> Option<Timestamp> {
    let current = parse(&authority.current.certificate)?;
    if let Some(next) = authority.next.as_ref().and_then(|n| parse(&n.certificate)) {
        return Some(next.not_before + BACKDATE + SETTLE);
    }
    if !authority.former.is_empty() {
        return Some(forgetting(authority, &current));
    }
    Some(current.not_after - rule.authority_renew_before())
}

/// Returns the data of a certificate's Secret.
#[must_use]
pub fn secret_data(pair: &Pair, authority: &Authority) -> Data {
    [(tls::CERTIFICATE, &pair.certificate), (tls::KEY, &pair.key), (tls::AUTHORITY, &authority.bundle())]
        .into_iter()
        .map(|(key, text)| (key.to_owned(), ByteString(text.as_bytes().to_vec())))
        .collect()
}

#[cfg(test)]
#[path = "certificates_tests.rs"]
mod tests;
