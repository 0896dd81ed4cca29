//! The cluster's certificate authority, the certificates it signs, and kubeconfig files.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose,
    IsCa, KeyPair, KeyUsagePurpose,
};

/// A certificate with its key, as PEM.
pub struct Identity {
    /// The certificate.
    pub certificate: String,
    /// Its private key.
    pub key: String,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity").field("certificate", &self.certificate).finish_non_exhaustive()
    }
}

/// The authority, and the folder of its files, which is closed to other users.
pub struct Pki {
    folder: PathBuf,
    authority: CertifiedIssuer<'static, KeyPair>,
}

impl std::fmt::Debug for Pki {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pki").field("folder", &self.folder).finish_non_exhaustive()
    }
}

impl Pki {
    /// Creates an authority in this new folder: `ca.crt`, `ca.key`, `service-accounts.key`, `service-accounts.pub`.
    pub fn create(folder: &Path) -> Result<Self> {
        use std::os::unix::fs::DirBuilderExt;
        fs::DirBuilder::new()
            .mode(0o700)
            .create(folder)
            .with_context(|| format!("make {}", folder.display()))?;
        let mut params = CertificateParams::default();
        params.distinguished_name = name("forebay-lab-ca", None);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        let pki = Self { folder: folder.to_owned(), authority };
        pki.write("ca.crt", &pki.authority.pem())?;
        pki.write("ca.key", &pki.authority.key().serialize_pem())?;
        let accounts = KeyPair::generate()?;
        pki.write("service-accounts.key", &accounts.serialize_pem())?;
        pki.write("service-accounts.pub", &accounts.public_key_pem())?;
        Ok(pki)
    }

    /// Issues a client certificate for this user (and group) that is also a server certificate for these names and addresses.
    pub fn issue(&self, user: &str, group: Option<&str>, names: &[String]) -> Result<Identity> {
        let mut params = CertificateParams::new(names)?;
        params.distinguished_name = name(user, group);
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.authority)?.pem();
        Ok(Identity { certificate, key: key.serialize_pem() })
    }

    /// Same, but writes `<file>.crt` and `<file>.key`.
    pub fn issue_files(&self, file: &str, user: &str, group: Option<&str>, names: &[String]) -> Result<()> {
        let identity = self.issue(user, group, names)?;
        self.write(&format!("{file}.crt"), &identity.certificate)?;
        self.write(&format!("{file}.key"), &identity.key)
    }

    /// The authority's certificate.
    pub fn authority(&self) -> String {
        self.authority.pem()
    }

    /// Path of a file in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// The text of a kubeconfig for this identity and this server.
    pub fn kubeconfig(&self, server: &str, identity: &Identity) -> String {
        // JSON is valid YAML.
        let encode = |pem: &str| base64(pem.as_bytes());
        let text = serde_json::json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "lab", "cluster": {
                "server": server,
                "certificate-authority-data": encode(&self.authority.pem()),
            }}],
            "users": [{"name": "user", "user": {
                "client-certificate-data": encode(&identity.certificate),
                "client-key-data": encode(&identity.key),
            }}],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "user"}}],
            "current-context": "lab",
        });
        format!("{text:#}\n")
    }

    /// Writes a kubeconfig with a new certificate for this user.
    pub fn kubeconfig_file(
        &self,
        file: &str,
        server: &str,
        user: &str,
        group: Option<&str>,
    ) -> Result<PathBuf> {
        let identity = self.issue(user, group, &[])?;
        self.write(file, &self.kubeconfig(server, &identity))?;
        Ok(self.path(file))
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        use std::io::Write;
        use std::os::unix::fs::OpenOptionsExt;
        let mut file =
            fs::File::options().write(true).create(true).truncate(true).mode(0o600).open(self.path(name))?;
        Ok(file.write_all(text.as_bytes())?)
    }
}

fn name(user: &str, group: Option<&str>) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    // In Kubernetes, the organisation is the group and the common name is the user.
    if let Some(group) = group {
        name.push(DnType::OrganizationName, group);
    }
    name.push(DnType::CommonName, user);
    name
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let group =
            chunk.iter().fold(0u32, |sum, byte| sum << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for digit in 0..4 {
            let value = (group >> (18 - 6 * digit)) & 63;
            out.push(if digit <= chunk.len() { char::from(DIGITS[value as usize]) } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn base64_matches_rfc_4648() {
        // [RFC4648] 10
        for (plain, coded) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(plain.as_bytes()), coded);
        }
    }

    #[test]
    fn keys_are_private_and_absent_from_debug_output() {
        let folder = tempfile::tempdir().expect("a folder");
        let pki = Pki::create(&folder.path().join("pki")).expect("an authority");
        let admin = pki
            .kubeconfig_file("admin.kubeconfig", "https://127.0.0.1:1", "admin", Some("system:masters"))
            .expect("a kubeconfig");
        for path in [pki.path("ca.key"), pki.path("service-accounts.key"), admin] {
            let mode = fs::metadata(&path).expect("it exists").permissions().mode();
            assert_eq!(mode & 0o077, 0, "{}", path.display());
        }
        let identity = pki.issue("someone", None, &["127.0.0.1".into()]).expect("a certificate");
        assert!(!format!("{pki:?} {identity:?}").contains("PRIVATE"));
    }
}
