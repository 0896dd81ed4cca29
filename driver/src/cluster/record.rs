//! A volume's Secret: its credentials, and the record of its intended location.
//!
//! It is written before the volume is created. A controller that gets the request again, after a crash or concurrently with
//! another controller, finds the instance and the password in it, so a volume is never created twice. A finalizer keeps it
//! until the driver has deleted the volume: deleting it manually would leave a volume that cannot be mounted. It is not
//! immutable: a new password replaces the old one in a single write.

use std::collections::{BTreeMap, HashMap};

use forebay_api::names;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::api::{DeleteParams, ObjectMeta, Patch, PatchParams, PostParams, Preconditions};
use kube::core::Status;
use serde_json::json;
use zeroize::Zeroize;

use super::{Kubernetes, ask};
use crate::error::Error;
use crate::handle::InstanceName;
use crate::limits::KUBERNETES_DEADLINE;
use crate::names::VolumeId;
use crate::secrets::{Credentials, Given, PASSWORD, PASSWORD2, USERNAME};

/// The key of the next password during a rotation, until it is certain that the server has it.
const NEXT: &str = "password-next";

/// The annotation with the time when the password was created; without it, the Secret's creation time applies.
const SINCE: &str = "storage.forebay.io/password-since";

/// One volume's Secret.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) share: VolumeId,
    pub(crate) instance: InstanceName,
    /// `None` if the contents cannot be used.
    credentials: Option<Credentials>,
    next: Option<Credentials>,
    /// When its password was created.
    pub(crate) since: Option<Timestamp>,
    uid: String,
    resource_version: String,
    finalizers: Vec<String>,
    /// It is marked as deleted: the API server then accepts no further finalizers.
    is_going: bool,
}

impl Record {
    /// Name of the Secret.
    pub(crate) fn name_of(share: &VolumeId) -> String {
        // A PersistentVolume's name is the requested name of the volume, and therefore its share.
        names::volume_secret(share.as_str())
    }

    pub(crate) async fn find(kubernetes: &Kubernetes, share: &VolumeId) -> Result<Option<Self>, Error> {
        match kubernetes.secret(&Self::name_of(share)).await? {
            Some(secret) => Self::read(share, secret).map(Some),
            None => Ok(None),
        }
    }

    /// Creates it, with a new password. `None` if it already exists, because another writer was faster.
    pub(crate) async fn make(
        kubernetes: &Kubernetes,
        share: &VolumeId,
        instance: &InstanceName,
    ) -> Result<Option<Self>, Error> {
        let credentials = Credentials::random(share)?;
        let secret = Self::write(kubernetes.namespace(), share, instance, &credentials);
        let parameters = PostParams::default();
        let api = kubernetes.secrets();
        match ask("create the volume's Secret", KUBERNETES_DEADLINE, api.create(&parameters, &secret)).await {
            Ok(secret) => Self::read(share, secret).map(Some),
            Err(Error::Kubernetes { source, .. }) if is(&source, Status::is_already_exists) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The credentials that the volume is mounted with.
    pub(crate) fn credentials(&self) -> Result<&Credentials, Error> {
        self.credentials.as_ref().ok_or_else(|| foreign(&self.share, "holds no usable credentials"))
    }

    /// Adds the next password to the record, before it is sent to any server.
    pub(crate) async fn with_next(self, kubernetes: &Kubernetes) -> Result<(Self, Credentials), Error> {
        if let Some(next) = self.next.clone() {
            return Ok((self, next));
        }
        let next = Credentials::random(&self.share)?;
        let data = json!({ NEXT: encode(next.expose_password()) });
        Ok((self.patch_data(kubernetes, data).await?, next))
    }

    /// Whether a rotation was begun but not finished.
    pub(crate) fn is_cut_off(&self) -> bool {
        self.next.is_some()
    }

    /// Makes `next` the password of the record; the previous one becomes `password2`.
    pub(crate) async fn promote(self, kubernetes: &Kubernetes, next: &Credentials) -> Result<Self, Error> {
        let previous = self.credentials.as_ref().map(|credentials| encode(credentials.expose_password()));
        let data = json!({
            USERNAME: encode(&next.username),
            PASSWORD: encode(next.expose_password()),
            PASSWORD2: previous,
            NEXT: null,
        });
        let mut metadata = self.metadata();
        metadata["annotations"] = json!({ SINCE: Timestamp::now().to_string() });
        self.patch(kubernetes, json!({ "metadata": metadata, "data": data })).await
    }

    async fn patch_data(self, kubernetes: &Kubernetes, data: serde_json::Value) -> Result<Self, Error> {
        let patch = json!({ "metadata": self.metadata(), "data": data });
        self.patch(kubernetes, patch).await
    }

    async fn patch(self, kubernetes: &Kubernetes, patch: serde_json::Value) -> Result<Self, Error> {
        let (name, api) = (Self::name_of(&self.share), kubernetes.secrets());
        let patch = Patch::Merge(patch);
        let parameters = PatchParams::default();
        let secret =
            ask("write the volume's Secret", KUBERNETES_DEADLINE, api.patch(&name, &parameters, &patch))
                .await?;
        Self::read(&self.share, secret)
    }

    /// Metadata for a patch of exactly this version of the Secret. Adds the finalizer if the Secret predates it.
    fn metadata(&self) -> serde_json::Value {
        let mut metadata = json!({ "uid": self.uid, "resourceVersion": self.resource_version });
        let own = names::FINALIZER_VOLUME;
        if !self.is_going && !self.finalizers.iter().any(|finalizer| finalizer == own) {
            let finalizers = self.finalizers.iter().map(String::as_str).chain([own]);
            metadata["finalizers"] = finalizers.collect();
        }
        metadata
    }

    /// Whether the same Secret, by its UID, still exists.
    pub(crate) async fn still_stands(&self, kubernetes: &Kubernetes) -> Result<bool, Error> {
        let secret = kubernetes.secret(&Self::name_of(&self.share)).await?;
        Ok(secret.is_some_and(|secret| secret.metadata.uid.as_deref() == Some(&*self.uid)))
    }

    /// Removes exactly this version of the Secret: if another client has changed it in the meantime, it stays.
    pub(crate) async fn remove(self, kubernetes: &Kubernetes) -> Result<(), Error> {
        let parameters = DeleteParams {
            preconditions: Some(Preconditions {
                uid: Some(self.uid.clone()),
                resource_version: Some(self.resource_version.clone()),
            }),
            ..Default::default()
        };
        let name = Self::name_of(&self.share);
        let api = kubernetes.secrets();
        let left = match ask(
            "delete the volume's Secret",
            KUBERNETES_DEADLINE,
            api.delete(&name, &parameters),
        )
        .await
        {
            Ok(deleted) => deleted.left(),
            Err(Error::Kubernetes { source, .. }) if is(&source, Status::is_not_found) => return Ok(()),
            Err(error) => return Err(error),
        };
        // It is marked as deleted, and is removed with its last finalizer.
        let Some(left) = left else { return Ok(()) };
        let kept: Vec<&str> =
            left.finalizers().iter().map(String::as_str).filter(|f| *f != names::FINALIZER_VOLUME).collect();
        if kept.len() == left.finalizers().len() {
            return Ok(());
        }
        let metadata = json!({
            "uid": left.metadata.uid,
            "resourceVersion": left.metadata.resource_version,
            "finalizers": kept,
        });
        let patch = Patch::Merge(json!({ "metadata": metadata }));
        let parameters = PatchParams::default();
        match ask("release the volume's Secret", KUBERNETES_DEADLINE, api.patch(&name, &parameters, &patch))
            .await
        {
            Err(Error::Kubernetes { source, .. }) if is(&source, Status::is_not_found) => Ok(()),
            result => result.map(drop),
        }
    }

    fn write(
        namespace: &str,
        share: &VolumeId,
        instance: &InstanceName,
        credentials: &Credentials,
    ) -> Secret {
        let labels = [
            (names::LABEL_MANAGED_BY, names::MANAGED_BY_DRIVER),
            (names::LABEL_CLUSTER, instance.cluster()),
            (names::LABEL_INSTANCE, instance.as_str()),
            (names::LABEL_VOLUME, share.as_str()),
        ];
        let data = [(USERNAME, &*credentials.username), (PASSWORD, credentials.expose_password())];
        Secret {
            metadata: ObjectMeta {
                name: Some(Self::name_of(share)),
                namespace: Some(namespace.to_owned()),
                finalizers: Some(vec![names::FINALIZER_VOLUME.to_owned()]),
                labels: Some(labels.into_iter().map(|(k, v)| (k.to_owned(), v.to_owned())).collect()),
                ..Default::default()
            },
            type_: Some("kubernetes.io/basic-auth".to_owned()),
            data: Some(
                data.into_iter().map(|(k, v)| (k.to_owned(), ByteString(v.as_bytes().to_vec()))).collect(),
            ),
            ..Default::default()
        }
    }

    /// Reads a Secret written by [`Self::write`]; any other Secret with that name is foreign.
    fn read(share: &VolumeId, secret: Secret) -> Result<Self, Error> {
        let foreign = |what: &str| foreign(share, what);
        let labels: BTreeMap<String, String> = secret.metadata.labels.unwrap_or_default();
        let label = |key: &str| labels.get(key).map(String::as_str);
        if label(names::LABEL_MANAGED_BY) != Some(names::MANAGED_BY_DRIVER) {
            return Err(foreign("lacks the driver's label"));
        }
        if label(names::LABEL_VOLUME) != Some(share.as_str()) {
            return Err(foreign("names another volume"));
        }
        let instance = label(names::LABEL_INSTANCE)
            .and_then(InstanceName::parse)
            .ok_or_else(|| foreign("names no instance"))?;
        let noted = secret.metadata.annotations.as_ref().and_then(|annotations| annotations.get(SINCE));
        let since = noted.and_then(|text| text.parse().ok()).or(secret
            .metadata
            .creation_timestamp
            .as_ref()
            .map(|time| time.0));
        let mut given = HashMap::new();
        for (key, mut value) in secret.data.unwrap_or_default() {
            if let Ok(text) = std::str::from_utf8(&value.0) {
                given.insert(key, text.to_owned());
            }
            value.0.zeroize();
        }
        let mut next = HashMap::new();
        if let Some(password) = given.remove(NEXT) {
            let username = given.get(USERNAME).cloned();
            next.extend(username.map(|username| (USERNAME.to_owned(), username)));
            next.insert(PASSWORD.to_owned(), password);
        }
        let usable = |mut given| Given::take(&mut given).ok().map(|given| given.for_volume(share));
        Ok(Self {
            share: share.clone(),
            instance,
            credentials: usable(given),
            next: usable(next),
            since,
            uid: secret.metadata.uid.unwrap_or_default(),
            resource_version: secret.metadata.resource_version.unwrap_or_default(),
            finalizers: secret.metadata.finalizers.unwrap_or_default(),
            is_going: secret.metadata.deletion_timestamp.is_some(),
        })
    }
}

fn foreign(share: &VolumeId, what: &str) -> Error {
    let name = Record::name_of(share);
    Error::Refused(format!(
        "Secret {name} {what}: it is not the one that the driver created for this volume; restore or remove it"
    ))
}

fn encode(text: &str) -> ByteString {
    ByteString(text.as_bytes().to_vec())
}

fn is(error: &kube::Error, what: impl Fn(&Status) -> bool) -> bool {
    matches!(error, kube::Error::Api(status) if what(status))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written() -> (VolumeId, Secret, Credentials) {
        let share = VolumeId::parse("pvc-1").expect("an id");
        let instance = InstanceName::parse("c-1").expect("a name");
        let credentials = Credentials::random(&share).expect("random bytes");
        (share.clone(), Record::write("ns", &share, &instance, &credentials), credentials)
    }

    #[test]
    fn record_round_trips_through_its_secret() {
        let (share, secret, credentials) = written();
        assert_eq!(secret.metadata.name.as_deref(), Some("forebay-pvc-1"));
        let record = Record::read(&share, secret).expect("its own");
        assert_eq!(record.instance.as_str(), "c-1");
        let read = record.credentials().expect("usable");
        assert_eq!(
            (read.username.as_str(), read.expose_password()),
            ("pvc-1", credentials.expose_password())
        );
        assert!(!format!("{record:?}").contains(credentials.expose_password()));
    }

    #[test]
    fn secrets_not_written_by_the_driver_are_refused() {
        type Change = fn(&mut Secret);
        let changes: [(&str, Change); 3] = [
            ("label", |s| s.metadata.labels = None),
            ("another volume", |s| {
                let labels = s.metadata.labels.as_mut().expect("labels");
                labels.insert(names::LABEL_VOLUME.into(), "pvc-2".into());
            }),
            ("no instance", |s| {
                let labels = s.metadata.labels.as_mut().expect("labels");
                labels.insert(names::LABEL_INSTANCE.into(), "c".into());
            }),
        ];
        for (what, change) in changes {
            let (share, mut secret, _) = written();
            change(&mut secret);
            let status = tonic::Status::from(Record::read(&share, secret).expect_err(what));
            assert_eq!(status.code(), tonic::Code::FailedPrecondition, "{what}");
            assert!(
                status.message().contains(what) && status.message().contains("forebay-pvc-1"),
                "{status}"
            );
        }
    }

    #[test]
    fn record_without_usable_password_still_names_the_instance() {
        type Change = fn(&mut Secret);
        let changes: [Change; 3] = [
            |s| s.data = None,
            |s| {
                s.data.as_mut().expect("data").remove("password");
            },
            |s| {
                s.data.as_mut().expect("data").insert("password".into(), ByteString(vec![0xff; 12]));
            },
        ];
        for change in changes {
            let (share, mut secret, _) = written();
            change(&mut secret);
            let record = Record::read(&share, secret).expect("it can be deleted");
            assert_eq!(record.instance.as_str(), "c-1");
            let status = tonic::Status::from(record.credentials().expect_err("unusable"));
            assert_eq!(status.code(), tonic::Code::FailedPrecondition, "{status}");
            assert!(status.message().contains("forebay-pvc-1"), "{status}");
        }
    }

    #[test]
    fn interrupted_rotation_keeps_the_current_and_the_next_password() {
        let (share, mut secret, credentials) = written();
        let next = "a-password-that-is-next";
        secret.data.as_mut().expect("data").insert(NEXT.into(), encode(next));
        let record = Record::read(&share, secret).expect("its own");
        let read = record.credentials().expect("usable");
        assert_eq!(
            read.expose_password(),
            credentials.expose_password(),
            "the next one may not be in effect yet"
        );
        assert_eq!(record.next.as_ref().map(Credentials::expose_password), Some(next));
        assert!(!format!("{record:?}").contains(next));
    }

    #[test]
    fn next_write_adds_a_missing_finalizer() {
        let own = names::FINALIZER_VOLUME;
        let patched = |finalizers: Option<Vec<&str>>, is_going: bool| {
            let (share, mut secret, _) = written();
            let metadata = &mut secret.metadata;
            metadata.uid = Some("u".into());
            metadata.resource_version = Some("7".into());
            metadata.finalizers = finalizers.map(|all| all.into_iter().map(str::to_owned).collect());
            metadata.deletion_timestamp =
                is_going.then(|| serde_json::from_value(json!("2026-11-24T00:00:00Z")).expect("a time"));
            Record::read(&share, secret).expect("its own").metadata()
        };
        let just = json!({ "uid": "u", "resourceVersion": "7" });
        let with =
            |finalizers: &[&str]| json!({ "uid": "u", "resourceVersion": "7", "finalizers": finalizers });
        assert_eq!(patched(None, false), with(&[own]));
        // A merge patch replaces the whole list.
        assert_eq!(patched(Some(vec!["example.com/held"]), false), with(&["example.com/held", own]));
        assert_eq!(patched(Some(vec![own]), false), just);
        assert_eq!(patched(Some(vec!["example.com/held"]), true), just, "the API server would refuse it");
    }
}
