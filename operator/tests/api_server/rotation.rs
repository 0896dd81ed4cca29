//! A complete rotation of a cluster's certificate authority, with a running server that is not restarted.

use std::collections::BTreeMap;

use forebay_api::names::{self, tls};
use forebay_operator::admin::{Admin, AdminError, Identity};
use forebay_operator::certificates::{Authority, Rule, SETTLE};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::json;

use crate::stage::{Stage, eventually, shared};

type Data = BTreeMap<String, ByteString>;

async fn data(stage: &Stage, name: &str) -> Data {
    stage.api::<Secret>().get(name).await.unwrap().data.unwrap()
}

fn text(data: &Data, key: &str) -> String {
    String::from_utf8(data[key].0.clone()).unwrap()
}

/// Replaces the cluster's authority and triggers the operator.
async fn put(stage: &Stage, authority: &Authority, round: u8) {
    let secrets = stage.api::<Secret>();
    let mut secret = secrets.get(&names::authority_secret("r")).await.unwrap();
    secret.data = Some(authority.write());
    secrets.replace(&names::authority_secret("r"), &PostParams::default(), &secret).await.unwrap();
    let touched = json!({ "metadata": { "annotations": { "stage/round": round.to_string() } } });
    stage.clusters().patch("r", &PatchParams::default(), &Patch::Merge(&touched)).await.unwrap();
}

/// Waits until the certificate of the server, or its bundle, fulfils `is`, and gives it to the server.
async fn settled(stage: &Stage, what: &str, is: impl Fn(&Data) -> bool) {
    eventually(what, || async {
        if is(&data(stage, "r-0-tls").await) { Ok(()) } else { Err("it is not".to_owned()) }
    })
    .await;
    stage.refresh_certificates("r-0").await;
}

/// Checks that the operator sees changes on the server: each trusts the other.
async fn check_mutual_trust(stage: &Stage, volumes: u32) {
    stage.make_volume("r-0", &format!("v{volumes}"));
    let cluster = stage
        .cluster("r", &format!("{volumes} volumes are reported"), |c| {
            c.status.as_ref().is_some_and(|s| s.summary.volumes == volumes)
        })
        .await;
    let ready = cluster.status.unwrap().conditions.into_iter().find(|c| c.type_ == "Ready").unwrap();
    assert_eq!(ready.status, "True", "{}", ready.message);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn authority_is_rotated_without_restarting_the_server() {
    let stage = Stage::new(shared(), "rotation", 1).await;
    let operator = stage.operate().await;
    stage.create("r", &json!({})).await;
    stage.run_pod("r-0").await;
    stage.condition("r", "Ready", "True", "AllInstancesReady").await;
    check_mutual_trust(&stage, 1).await;
    let first = Authority::read(&data(&stage, "r-ca").await).unwrap();
    let identity_of_first = Identity::new(&data(&stage, &names::operator_secret("r")).await).unwrap();

    // The same in Prometheus' view.
    let metric = |name: &str, labels: &str| -> Option<f64> {
        let series = format!("forebay_operator_{name}{{cluster=\"r\",{labels}}} ");
        let metrics = operator.metrics.text();
        metrics.lines().find_map(|line| line.strip_prefix(&series)?.parse().ok())
    };
    let ready = |status| metric("condition", &format!("condition=\"Ready\",status=\"{status}\""));
    assert_eq!((ready("True"), ready("False"), ready("Unknown")), (Some(1.0), Some(0.0), Some(0.0)));
    let days_until = |moment: Option<f64>| (moment.unwrap() - Timestamp::now().as_second() as f64) / 86400.0;
    for (secret, days, end) in [
        (names::authority_secret("r"), 10.0 * 365.0 - 90.0, 10.0 * 365.0),
        (names::operator_secret("r"), 60.0, 90.0),
        (names::driver_secret("r"), 60.0, 90.0),
        (names::server_secret("r-0"), 60.0, 90.0),
    ] {
        let label = format!("secret=\"{secret}\"");
        let renewal = days_until(metric("certificate_renewal_timestamp_seconds", &label));
        assert!((renewal - days).abs() < 1.0, "{secret} is to be replaced in {renewal} days");
        let left = days_until(metric("certificate_expiry_timestamp_seconds", &label));
        assert!((left - end).abs() < 1.0, "{secret} ends in {left} days");
    }

    let before = text(&data(&stage, "r-0-tls").await, tls::CERTIFICATE);

    // The next authority is published; in a quarter of a minute it will have been for an hour.
    let rule = Rule::new(&forebay_api::cluster::Certificates::default());
    let known_since = Timestamp::now() - SETTLE + SignedDuration::from_secs(15);
    let next = Authority::create("r", known_since, rule).unwrap().current;
    put(&stage, &Authority { next: Some(next.clone()), ..first.clone() }, 1).await;
    settled(&stage, "the server is to trust both", |d| {
        text(d, tls::AUTHORITY).contains(next.certificate.trim())
            && text(d, tls::AUTHORITY).contains(first.current.certificate.trim())
    })
    .await;
    check_mutual_trust(&stage, 2).await;

    // It signs: all get new certificates.
    settled(&stage, "the server has a certificate of the next one", |d| text(d, tls::CERTIFICATE) != before)
        .await;
    let promoted = Authority::read(&data(&stage, "r-ca").await).unwrap();
    assert_eq!(promoted.current.certificate.trim(), next.certificate.trim());
    assert_eq!(promoted.former.len(), 1);
    check_mutual_trust(&stage, 3).await;

    // An hour later the former authority is removed.
    let long_ago = Timestamp::now() - SETTLE * 2;
    put(&stage, &Authority { promoted: Some(long_ago), ..promoted }, 2).await;
    settled(&stage, "the server is to trust the new one alone", |d| {
        !text(d, tls::AUTHORITY).contains(first.current.certificate.trim())
    })
    .await;
    check_mutual_trust(&stage, 4).await;

    // A client that still presents a certificate of the first authority is refused.
    let server = names::admin_server_name("r-0", &stage.namespace);
    let endpoint = stage.admin_endpoint(1);
    eventually("the first authority's certificates are refused", || async {
        match Admin::connect(endpoint, &server, &identity_of_first).await {
            Err(AdminError::Connect { .. }) => Ok(()),
            Err(error) => Err(error.to_string()),
            // In TLS 1.3, a client learns only when it reads that it was refused.
            Ok(mut admin) => match admin.report(|_| 100).await {
                Err(AdminError::Call { .. }) => Ok(()),
                other => Err(format!("{other:?}")),
            },
        }
    })
    .await;
    operator.assert_working();
    operator.stop().await;
}
