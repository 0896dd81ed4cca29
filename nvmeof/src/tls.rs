//! TLS on NVMe/TCP: derives keys for a host and a subsystem from a configured pre-shared key (NVMe/TCP 3.6.1).

use std::fmt;

use aws_lc_rs::{hkdf, hmac};
use zeroize::Zeroizing;

use crate::base64;
use crate::nqn::Nqn;
use crate::secret::{Hash, TlsPsk};

/// Maximum length of a label or a context of HKDF-Expand-Label (RFC 8446 7.1).
const CONTEXT_BYTES_MAX: usize = 255;

/// TLS 1.3 on NVMe/TCP. The kernel delegates the handshake to `tlshd`, which must run on the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// The configured key.
    pub psk: TlsPsk,
    /// Version of the key's identity.
    pub identity: IdentityVersion,
}

/// Version of a PSK identity (NVMe/TCP 3.6.1.3): both ends must use the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IdentityVersion {
    /// Host and subsystem only, as supported by older targets.
    Zero,
    /// Host, subsystem and a digest of the key, so that a new key has a new identity.
    #[default]
    One,
}

/// The names are too long together for an identity of version 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "host NQN and subsystem NQN are too long together for an identity of version 0: use version 1, or a shorter subsystem NQN"
)]
pub struct TooLong;

/// The TLS PSK and its identity, as used in a handshake.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct PairPsk {
    pub(crate) identity: String,
    pub(crate) key: Zeroizing<Vec<u8>>,
}

impl fmt::Debug for PairPsk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PairPsk({}, redacted)", self.identity)
    }
}

impl Tls {
    /// Derives the key for this host and this subsystem.
    pub(crate) fn pair(&self, host: &Nqn, subsystem: &Nqn) -> Result<PairPsk, TooLong> {
        self.of_names(host.as_str(), subsystem.as_str())
    }

    fn of_names(&self, host: &str, subsystem: &str) -> Result<PairPsk, TooLong> {
        let configured = self.psk.key();
        // NVMe/TCP 3.6.1.1: the retained PSK.
        let retained = match self.psk.transform() {
            Some(hash) => expand_label(hash, configured, "HostNQN", host, configured.len())?,
            None => Zeroizing::new(configured.to_vec()),
        };
        let hash = self.psk.hash();
        let number = hash.number();
        // NVMe/TCP 3.6.1.3: the identity. `R` is for a retained PSK.
        let (identity, context) = match self.identity {
            IdentityVersion::Zero => {
                let identity = format!("NVMe0R{number} {host} {subsystem}");
                (identity.clone(), identity)
            }
            IdentityVersion::One => {
                let digest = digest(hash, &retained, host, subsystem);
                (format!("NVMe1R{number} {host} {subsystem} {digest}"), format!("{number} {digest}"))
            }
        };
        // NVMe/TCP 3.6.1.4: the TLS PSK.
        let key = expand_label(hash, &retained, "nvme-tls-psk", &context, hash.bytes())?;
        Ok(PairPsk { identity, key })
    }
}

/// Whether this is the identity of any key for this host and this subsystem.
pub(crate) fn is_of(identity: &str, host: &Nqn, subsystem: &Nqn) -> bool {
    let mut words = identity.split(' ');
    let mut is = |expected: &str| words.next() == Some(expected);
    let kind = identity.split(' ').next().unwrap_or_default();
    let retained = kind.starts_with("NVMe") && kind.len() == 8 && kind.as_bytes()[5] == b'R';
    retained && is(kind) && is(host.as_str()) && is(subsystem.as_str())
}

impl Hash {
    /// As in identities.
    fn number(self) -> &'static str {
        match self {
            Self::Sha256 => "01",
            Self::Sha384 => "02",
        }
    }

    /// Length of its output.
    fn bytes(self) -> usize {
        match self {
            Self::Sha256 => 32,
            Self::Sha384 => 48,
        }
    }

    fn hkdf(self) -> hkdf::Algorithm {
        match self {
            Self::Sha256 => hkdf::HKDF_SHA256,
            Self::Sha384 => hkdf::HKDF_SHA384,
        }
    }

    fn hmac(self) -> hmac::Algorithm {
        match self {
            Self::Sha256 => hmac::HMAC_SHA256,
            Self::Sha384 => hmac::HMAC_SHA384,
        }
    }
}

/// NVMe/TCP 3.6.1.3: distinguishes keys of the same pair.
fn digest(hash: Hash, retained: &[u8], host: &str, subsystem: &str) -> String {
    let key = hmac::Key::new(hash.hmac(), retained);
    let tag = hmac::sign(&key, format!("{host} {subsystem} NVMe-over-Fabrics").as_bytes());
    // It is sent in the clear, so it is no secret.
    base64::encode(tag.as_ref()).to_string()
}

/// Length of the output of HKDF.
struct Length(usize);

impl hkdf::KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

/// HKDF-Extract without salt (RFC 5869 2.2) and HKDF-Expand-Label (RFC 8446 7.1).
fn expand_label(
    hash: Hash,
    secret: &[u8],
    label: &str,
    context: &str,
    length: usize,
) -> Result<Zeroizing<Vec<u8>>, TooLong> {
    if context.len() > CONTEXT_BYTES_MAX {
        return Err(TooLong);
    }
    let label = format!("tls13 {label}");
    let sizes = [length as u16, label.len() as u16, context.len() as u16].map(u16::to_be_bytes);
    let info = [&sizes[0], &sizes[1][1..], label.as_bytes(), &sizes[2][1..], context.as_bytes()];
    let extracted = hkdf::Salt::new(hash.hkdf(), &[]).extract(secret);
    let mut key = Zeroizing::new(vec![0; length]);
    extracted
        .expand(&info, Length(length))
        .and_then(|expanded| expanded.fill(&mut key))
        .expect("it is far shorter than what HKDF can give");
    Ok(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secret::tests::psk;

    /// The key of libnvme's own tests; the longer key is this one followed by its second half.
    const KEY: [u8; 32] = [
        0x55, 0x12, 0xDB, 0xB6, 0x73, 0x7D, 0x01, 0x06, 0xF6, 0x59, 0x75, 0xB7, 0x73, 0xDF, 0xB0, 0x11, 0xFF,
        0xC3, 0x44, 0xBC, 0xF4, 0x42, 0xE2, 0xDD, 0x6D, 0x8B, 0xC4, 0x87, 0x0B, 0x5D, 0x5B, 0x03,
    ];

    fn tls(text: &str, identity: IdentityVersion) -> Tls {
        Tls { psk: TlsPsk::parse(text).expect("a key"), identity }
    }

    fn longer() -> Vec<u8> {
        [&KEY[..], &KEY[16..]].concat()
    }

    #[test]
    fn tls_psk_identities_match_libnvme_test_vectors() {
        let short = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
        let long =
            "NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcLXVsDn8kXZQ==:";
        assert_eq!((short, long), (psk("01", &KEY).as_str(), psk("02", &longer()).as_str()));
        for (text, version, expected) in [
            (
                short,
                IdentityVersion::One,
                "NVMe1R01 nqn.psk-test-host nqn.psk-test-subsys iSbjiStwJ/1TrTvDlt2fjFmzvsytOJelidNnA+X5lEU=",
            ),
            (
                long,
                IdentityVersion::One,
                "NVMe1R02 nqn.psk-test-host nqn.psk-test-subsys QhW2+Rp6RzHlNtCslyRxMnwJ11tKKhz8JCAQpQ+XUD8f9td1VeH5h53yz2wKJG1a",
            ),
            (short, IdentityVersion::Zero, "NVMe0R01 nqn.psk-test-host nqn.psk-test-subsys"),
            (long, IdentityVersion::Zero, "NVMe0R02 nqn.psk-test-host nqn.psk-test-subsys"),
        ] {
            let pair =
                tls(text, version).of_names("nqn.psk-test-host", "nqn.psk-test-subsys").expect("short");
            assert_eq!(pair.identity, expected);
            assert_eq!(format!("{pair:?}"), format!("PairPsk({expected}, redacted)"));
        }
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn bytes(hex: &str) -> Vec<u8> {
        let digit = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).expect("hexadecimal");
        (0..hex.len()).step_by(2).map(digit).collect()
    }

    /// These vectors use PSKs without a hash, so the retained PSK equals the configured one.
    #[test]
    fn psk_digests_and_tls_psks_match_kernel_test_vectors() {
        for (input, number, digest, expected) in [
            (
                "1733c59fa7f48fcf37f5f26fc4ff0268ad4f78e030f4f3b0bfd1d47e7bb1447a",
                "01",
                "OldoKuTfKddMuyCznAZojkWD7P4D9/AtzDzLimtOxqI=",
                "3c17da628474a04d2247c4cab47968c915388193f7c071bd9489cc3666cd7cc8",
            ),
            (
                "f14b2dd3234c459694d3bc63f8968bd6b37c2c6de849e22e118749001ce4bbe8640b9e3a748cb11ce4b1d71d359cce39",
                "02",
                "cffMWk8TSS7HOQebjgYEIkrPrjWPV4JE5cdPB8WhEvY4JBW5YynKyv66XscN4A9n",
                "2774753233537b3fa50eb7d16a8e43457d85f4906c005b2236616c5d80939d0898fff15bb8b77119d2be0aac423e7590",
            ),
        ] {
            let made = tls(&psk("00", &bytes(input)), IdentityVersion::One).of_names("hostnqn", "subsysnqn");
            let made = made.expect("short");
            assert_eq!(made.identity, format!("NVMe1R{number} hostnqn subsysnqn {digest}"));
            assert_eq!(hex(&made.key), expected);
        }
    }

    /// No test vectors are published for these; the values were computed with Python's hmac from the same sections.
    #[test]
    fn retained_and_tls_psks_match_an_independent_implementation() {
        for (hash, key, version, expected) in [
            (
                "01",
                KEY.to_vec(),
                IdentityVersion::Zero,
                "05c6503551ad136e6ee32e6eeb3f6d500b69701d84ec71e328f65c7f51566f68",
            ),
            (
                "01",
                KEY.to_vec(),
                IdentityVersion::One,
                "8fc3c0badfd4c0c66fa3ca33aadd0314f85536cc9bc47338b60f3e6e563786ca",
            ),
            (
                "02",
                longer(),
                IdentityVersion::Zero,
                "f42ba63824cdfe421914c582921f85b5b5b7e2d4df084caeedc9be20b212e8bb0fe8a23e9d59a1c8fc6449da4970a78d",
            ),
            (
                "02",
                longer(),
                IdentityVersion::One,
                "a2b2f943f479fc682555cec89857c80ed004ce92f32a973d5764155bb7e36b17a85368a0666d250afac9282dda2e62ca",
            ),
        ] {
            let made = tls(&psk(hash, &key), version).of_names("nqn.psk-test-host", "nqn.psk-test-subsys");
            assert_eq!(hex(&made.expect("short").key), expected, "{hash} {version:?}");
        }
    }

    #[test]
    fn overlong_names_are_rejected_for_identity_version_0() {
        let subsystem = format!("nqn.{}", "a".repeat(215));
        let long = |version| {
            tls(&psk("01", &KEY), version).of_names("nqn.host-with-a-name-of-its-own-012345", &subsystem)
        };
        assert_eq!(long(IdentityVersion::Zero), Err(TooLong));
        assert!(long(IdentityVersion::One).is_ok());
    }

    #[test]
    fn psk_identity_matches_only_its_host_and_subsystem() {
        let nqn = |text: &str| text.parse::<Nqn>().expect("an NQN");
        let (host, subsystem) = (nqn("nqn.h"), nqn("nqn.s"));
        let is = |identity: &str| is_of(identity, &host, &subsystem);
        assert!(is("NVMe0R01 nqn.h nqn.s") && is("NVMe1R02 nqn.h nqn.s abc="));
        // Keys that the kernel has created, keys of others, and keys with the same prefix only.
        for other in [
            "",
            "NVMe1G01 nqn.h nqn.s abc=",
            "NVMe0R01 nqn.h nqn.st",
            "NVMe0R01 nqn.x nqn.s",
            "NVMe0R01 nqn.h",
            "x nqn.h nqn.s",
        ] {
            assert!(!is(other), "{other}");
        }
    }
}
