//! Names that operator, driver, node agent, command line and chart must agree on.

/// Label on everything made for a StorageCluster: its name.
pub const LABEL_CLUSTER: &str = "storage.forebay.io/cluster";
/// Label on cluster-scoped objects made for a StorageCluster: its namespace.
pub const LABEL_CLUSTER_NAMESPACE: &str = "storage.forebay.io/cluster-namespace";
/// Label on everything made for one instance: its name.
pub const LABEL_INSTANCE: &str = "storage.forebay.io/instance";
/// Label on a volume's Secret: the volume's id.
pub const LABEL_VOLUME: &str = "storage.forebay.io/volume";
/// The common Kubernetes label that names the program that made an object.
pub const LABEL_MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// Value of [`LABEL_MANAGED_BY`] on the operator's objects.
pub const MANAGED_BY_OPERATOR: &str = "forebay-operator";
/// Value of [`LABEL_MANAGED_BY`] on the driver's objects.
pub const MANAGED_BY_DRIVER: &str = "forebay-csi";
/// Annotation on an instance's StatefulSet: the node its state lies on.
pub const ANNOTATION_NODE: &str = "storage.forebay.io/node";
/// Annotation on a StorageClass made for a StorageCluster: the class's name. It distinguishes the class from a copy that a user
/// has made of it.
pub const ANNOTATION_CLASS: &str = "storage.forebay.io/class";
/// Keeps a StorageCluster until its instances are gone and its volumes are seen to.
pub const FINALIZER_CLUSTER: &str = "storage.forebay.io/cluster";

/// Keeps a volume's Secret until the driver has deleted the volume: without its password it cannot be mounted.
pub const FINALIZER_VOLUME: &str = "storage.forebay.io/volume";

/// Common name and DNS name of the operator's client certificate.
pub const CLIENT_OPERATOR: &str = "forebay-operator";
/// Common name and DNS name of the driver's client certificate.
pub const CLIENT_DRIVER: &str = "forebay-csi";

/// Parameter of a StorageClass: the StorageCluster with the instances that hold its volumes.
pub const PARAMETER_CLUSTER: &str = "cluster";
/// Parameter of a StorageClass: the namespace of [`PARAMETER_CLUSTER`].
pub const PARAMETER_CLUSTER_NAMESPACE: &str = "clusterNamespace";

/// Parameter of a StorageClass: by what its volumes are mounted, `auto`, `rdma` or `tcp`.
pub const PARAMETER_TRANSPORT: &str = "transport";

/// What a container asks its node for to be let at the node's RDMA devices; offered by the node plugin.
pub const RESOURCE_RDMA: &str = "storage.forebay.io/rdma";

/// Annotation on an instance's pod: the instance is to go to another node, in an orderly way. Its value may name the node.
pub const ANNOTATION_MOVE: &str = "storage.forebay.io/move";
/// Annotation on a StorageCluster: with the value `true`, takeovers do not pause, however many nodes are silent.
pub const ANNOTATION_TAKE_OVER_ANYWAY: &str = "storage.forebay.io/take-over-anyway";
/// Label of the pods of the bundled target: the value of `app.kubernetes.io/component`.
pub const COMPONENT_TARGET: &str = "target";

/// Keys of a TLS Secret, as `kubernetes.io/tls` has them, and the authority that signed it.
pub mod tls {
    /// Certificate chain, PEM.
    pub const CERTIFICATE: &str = "tls.crt";
    /// Private key, PEM.
    pub const KEY: &str = "tls.key";
    /// Certificates of the authority, PEM; two of them while it is being replaced.
    pub const AUTHORITY: &str = "ca.crt";
}

/// Name of the `ordinal`th instance of a cluster. It is the instance's identity: the StatefulSet, the Service, the
/// server certificate's DNS name and the folder of its pools are named after it.
#[must_use]
pub fn instance(cluster: &str, ordinal: u32) -> String {
    format!("{cluster}-{ordinal}")
}

/// Name of the ConfigMap that records which node the instances are on, and in which epoch. It outlives the cluster where its
/// volumes are retained, and where instances have epochs.
#[must_use]
pub fn placement_record(cluster: &str) -> String {
    format!("{cluster}-placement")
}

/// Key of the placement record: an instance's epoch.
#[must_use]
pub fn epoch_key(instance: &str) -> String {
    format!("{instance}.epoch")
}

/// Key of the placement record: the reservation key of the former owner that an instance may take a pool from.
#[must_use]
pub fn adopted_key(instance: &str, pool: &str) -> String {
    format!("{instance}.adopt.{pool}")
}

/// Name of the Secret with the cluster's certificate authority (its key never leaves the operator).
#[must_use]
pub fn authority_secret(cluster: &str) -> String {
    format!("{cluster}-ca")
}

/// Name of the Secret with an instance's server certificate for the admin API.
#[must_use]
pub fn server_secret(instance: &str) -> String {
    format!("{instance}-tls")
}

/// Name of the Secret with the CSI controller's client certificate for the admin API of a cluster's instances.
#[must_use]
pub fn driver_secret(cluster: &str) -> String {
    format!("{cluster}-csi-tls")
}

/// Name of the Secret with the operator's own client certificate.
#[must_use]
pub fn operator_secret(cluster: &str) -> String {
    format!("{cluster}-operator-tls")
}

/// Name of the Secret with a volume's credentials, by the name of its PersistentVolume.
#[must_use]
pub fn volume_secret(persistent_volume: &str) -> String {
    format!("forebay-{persistent_volume}")
}

/// The DNS name in an instance's server certificate, which clients of the admin API must ask for, whatever address they
/// connect to.
#[must_use]
pub fn admin_server_name(instance: &str, namespace: &str) -> String {
    format!("{instance}.{namespace}.forebay.internal")
}
