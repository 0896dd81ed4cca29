//! The credentials of a volume, as passed in a call.

use std::collections::HashMap;
use std::fmt;

use forebay_proto::admin;
use zeroize::{Zeroize, Zeroizing};

use crate::error::Error;
use crate::limits::{
    PASSWORD_BYTES_MAX, PASSWORD_CHARS_MIN, PASSWORD_RANDOM_BYTES, USERNAME_BYTES_MAX, VOLUME_ID_BYTES_MAX,
};
use crate::names::VolumeId;

const _: () = assert!(VOLUME_ID_BYTES_MAX <= USERNAME_BYTES_MAX);

/// The key of the user name in a Secret.
pub(crate) const USERNAME: &str = "username";
/// The key of the password in a Secret.
pub(crate) const PASSWORD: &str = "password";
/// The key of a second valid password during a rotation.
pub(crate) const PASSWORD2: &str = "password2";

/// The contents of a call's secrets: a password, and an optional user name.
pub(crate) struct Given {
    username: Option<String>,
    password: Zeroizing<String>,
    second: Option<Zeroizing<String>>,
}

impl Given {
    /// Takes the credentials from a call's secrets, and zeroizes all values of the call.
    pub(crate) fn take(secrets: &mut HashMap<String, String>) -> Result<Self, Error> {
        let username = secrets.remove(USERNAME);
        let password = secrets.remove(PASSWORD).map(Zeroizing::new);
        let second = secrets.remove(PASSWORD2).map(Zeroizing::new);
        secrets.values_mut().for_each(Zeroize::zeroize);
        secrets.clear();
        let password = password.ok_or(Error::MissingSecret)?;
        let usable = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        let is_name =
            |name: &String| (1..=USERNAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(usable);
        if username.as_ref().is_some_and(|name| !is_name(name)) {
            return Err(Error::invalid(
                "secrets.username",
                format!("must be 1 to {USERNAME_BYTES_MAX} of A-Z a-z 0-9 . _ -"),
            ));
        }
        check_password("secrets.password", &password)?;
        if let Some(second) = &second {
            check_password("secrets.password2", second)?;
        }
        Ok(Self { username, password, second })
    }

    /// The credentials of this volume. A user can open only one volume, so a Secret for a whole StorageClass contains no user
    /// name: the volume's ID is then the user name.
    pub(crate) fn for_volume(self, volume_id: &VolumeId) -> Credentials {
        let username = self.username.unwrap_or_else(|| volume_id.to_string());
        Credentials { username, password: self.password, second: self.second }
    }
}

fn check_password(field: &'static str, password: &str) -> Result<(), Error> {
    if password.chars().count() < PASSWORD_CHARS_MIN || password.len() > PASSWORD_BYTES_MAX {
        let reason = format!("must be {PASSWORD_CHARS_MIN} characters to {PASSWORD_BYTES_MAX} bytes long");
        return Err(Error::invalid(field, reason));
    }
    match password.contains('\0') {
        true => Err(Error::invalid(field, "must not contain a zero byte")),
        false => Ok(()),
    }
}

/// User name and password; passwords are zeroized on drop and never printed.
#[derive(Clone)]
pub(crate) struct Credentials {
    pub(crate) username: String,
    password: Zeroizing<String>,
    second: Option<Zeroizing<String>>,
}

impl Credentials {
    /// Generates credentials for a new volume: its ID is the user name.
    pub(crate) fn random(volume_id: &VolumeId) -> Result<Self, Error> {
        let mut bytes = Zeroizing::new([0; PASSWORD_RANDOM_BYTES]);
        getrandom::fill(&mut *bytes).map_err(|_| Error::NoRandomness)?;
        // Allocates the full length: a reallocation would leave copies behind.
        let mut password = Zeroizing::new(String::with_capacity(PASSWORD_RANDOM_BYTES * 2));
        for byte in bytes.iter() {
            for digit in [byte >> 4, byte & 0xf] {
                password.push(char::from_digit(digit.into(), 16).expect("four bits"));
            }
        }
        Ok(Self { username: volume_id.to_string(), password, second: None })
    }

    /// Exposes the password to its only user.
    pub(crate) fn expose_password(&self) -> &str {
        &self.password
    }

    /// The password and the second valid one, for a mount.
    pub(crate) fn expose_passwords(&self) -> (&str, Option<&str>) {
        (&self.password, self.second.as_ref().map(|second| second.as_str()))
    }

    pub(crate) fn to_admin(&self) -> admin::Credentials {
        admin::Credentials { username: self.username.clone(), password: self.password.to_string() }
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("username", &self.username)
            .field("password", &forebay_proto::Redacted)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(pairs: &[(&str, &str)]) -> Result<Credentials, Error> {
        let mut secrets = pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let result = Given::take(&mut secrets);
        assert!(secrets.is_empty(), "secrets stay in the request");
        Ok(result?.for_volume(&VolumeId::from_name("pvc-1").expect("a name")))
    }

    #[test]
    fn credentials_are_taken_from_the_request_and_never_printed() {
        let credentials =
            take(&[("username", "vol-1"), ("password", "correct horse"), ("extra", "x")]).expect("usable");
        assert_eq!(credentials.expose_password(), "correct horse");
        assert_eq!(format!("{credentials:?}"), r#"Credentials { username: "vol-1", password: *** }"#);
        assert_eq!(take(&[("password", "correct horse")]).expect("usable").username, "pvc-1");
        let two = take(&[("password", "correct horse"), ("password2", "battery staple")]).expect("usable");
        assert_eq!(two.expose_passwords(), ("correct horse", Some("battery staple")));
    }

    #[test]
    fn generated_passwords_are_valid_and_distinct() {
        let volume_id = VolumeId::from_name("pvc-1").expect("a name");
        let made = || Credentials::random(&volume_id).expect("random bytes");
        let (first, second) = (made(), made());
        assert_ne!(first.expose_password(), second.expose_password());
        let again = take(&[("username", "pvc-1"), ("password", first.expose_password())]).expect("usable");
        assert_eq!((again.username, first.expose_password().len()), (first.username.clone(), 64));
    }

    #[test]
    fn credential_errors_explain_the_problem_without_the_password() {
        let long = "p".repeat(256);
        for (pairs, part) in [
            (&[("username", "u")][..], "csi.storage.k8s.io/provisioner-secret-name"),
            (&[("username", ""), ("password", "12345678")], "secrets.username"),
            (&[("username", "u"), ("password", "1234567")], "8 characters"),
            (&[("username", "u"), ("password", &long)], "255 bytes"),
            (&[("username", "a b"), ("password", "12345678")], "secrets.username"),
            (&[("username", "u"), ("password", "1234\x005678")], "zero byte"),
            (
                &[("username", "u"), ("password", "correct horse"), ("password2", "1234567")],
                "secrets.password2",
            ),
        ] {
            let error = take(pairs).expect_err(part).to_string();
            assert!(error.contains(part), "{error}");
            assert!(!error.contains("1234"), "{error}");
        }
    }
}
