//! The gRPC interfaces of Forebay.
//!
//! [`csi`] is the Container Storage Interface between Kubernetes and the driver, [`admin`] the administration
//! interface between the driver and a server, [`registration`] the kubelet's plugin registration, [`device_plugin`] its
//! device plugins. All are generated from `proto/*.proto` and committed; `tests/generated.rs` regenerates them and
//! fails where they drift. Where each .proto file comes from is said in `PROVENANCE.md`.
//!
//! Messages that carry secrets print [`Redacted`] in their place.

use std::fmt;

use zeroize::Zeroize;

mod pool;
pub mod root;

/// `csi.v1`, the Container Storage Interface 1.12.
#[rustfmt::skip]
#[allow(missing_docs, unreachable_pub, unused_qualifications, clippy::all, rustdoc::all)]
#[path = "gen/csi.v1.rs"]
pub mod csi;

/// `forebay.admin.v1`, the administration interface of a Forebay server.
#[rustfmt::skip]
#[allow(missing_docs, unreachable_pub, unused_qualifications, clippy::all, rustdoc::all)]
#[path = "gen/forebay.admin.v1.rs"]
pub mod admin;

/// `pluginregistration`, version 1: how the driver makes itself known to the kubelet.
#[rustfmt::skip]
#[allow(missing_docs, unreachable_pub, unused_qualifications, clippy::all, rustdoc::all)]
#[path = "gen/pluginregistration.rs"]
pub mod registration;

/// `v1beta1` of the kubelet's device plugins: how the driver offers a node's RDMA devices to containers.
#[rustfmt::skip]
#[allow(missing_docs, unreachable_pub, unused_qualifications, clippy::all, rustdoc::all)]
#[path = "gen/v1beta1.rs"]
pub mod device_plugin;

/// The message is a copy of a password, in a program that may live long.
impl Drop for admin::Credentials {
    fn drop(&mut self) {
        self.password.zeroize();
    }
}

/// What a secret looks like in a Debug output.
pub struct Redacted;

impl fmt::Debug for Redacted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

#[cfg(test)]
mod tests {
    use super::{admin, csi};

    const SECRET: &str = "correct horse";

    #[test]
    fn debug_output_shows_no_csi_secret() {
        let secrets = || [("password".to_owned(), SECRET.to_owned())].into();
        let outputs = [
            format!("{:?}", csi::CreateVolumeRequest { secrets: secrets(), ..Default::default() }),
            format!("{:?}", csi::DeleteVolumeRequest { secrets: secrets(), ..Default::default() }),
            format!("{:?}", csi::ControllerExpandVolumeRequest { secrets: secrets(), ..Default::default() }),
            format!("{:?}", csi::NodeStageVolumeRequest { secrets: secrets(), ..Default::default() }),
            format!("{:#?}", csi::NodePublishVolumeRequest { secrets: secrets(), ..Default::default() }),
        ];
        for output in outputs {
            assert!(!output.contains(SECRET), "{output}");
            assert!(output.contains("secrets: ***"), "{output}");
        }
    }

    #[test]
    fn debug_output_shows_no_admin_password() {
        let credentials = admin::Credentials { username: "u".into(), password: SECRET.into() };
        let request = admin::CreateVolumeRequest { credentials: Some(credentials), ..Default::default() };
        let output = format!("{request:?}");
        assert!(!output.contains(SECRET) && output.contains(r#"username: "u""#), "{output}");
    }
}
