//! Secrets: makes and renews certificates, and removes the credentials of destroyed volumes.

use std::collections::BTreeMap;
use std::net::IpAddr;

use forebay_api::cluster::StorageCluster;
use forebay_api::names;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::json;

use super::{Context, ReconcileError};
use crate::admin::Identity;
use crate::certificates::{self, Authority, AuthorityStep, Due, Leaf, Rule, Term};
use crate::desired::CertificatesState;
use crate::desired::objects::labels;
use crate::metrics::Written;

/// Makes and renews certificates. Those of a paused cluster are only read.
pub(super) async fn certify(
    context: &Context,
    cluster: &StorageCluster,
    servers: &[(String, IpAddr)],
    now: Timestamp,
) -> Result<(CertificatesState, Option<Identity>), ReconcileError> {
    let name = cluster.name_any();
    let namespace = &context.settings.namespace;
    let rule = Rule::new(&cluster.spec.security.certificates);
    let api: Api<Secret> = Api::namespaced(context.client.clone(), namespace);
    let mut state = CertificatesState::default();
    let authority_name = names::authority_secret(&name);
    let found = api.get_opt(&authority_name).await?;
    if let Some(found) = &found
        && found.labels().get(names::LABEL_CLUSTER) != Some(&name)
    {
        state.problem =
            Some(format!("Secret {authority_name} exists but was not created for this cluster: delete it"));
        return Ok((state, None));
    }
    let mut authority = found.as_ref().and_then(|s| Authority::read(s.data.as_ref()?));
    let step = certificates::authority_step(now, rule, authority.as_ref());
    let writing = !cluster.spec.paused;
    if step != AuthorityStep::Keep && writing {
        let after = match authority {
            Some(authority) => authority.after(step, &name, now, rule)?,
            None => Authority::create(&name, now, rule)?,
        };
        write_secret(context, cluster, &api, found, &authority_name, None, after.write()).await?;
        tracing::info!(cluster = name, ?step, "certificate authority");
        authority = Some(after);
    }
    let Some(authority) = authority else {
        state.problem = Some("there is no certificate authority, and spec.paused is true".to_owned());
        return Ok((state, None));
    };
    let mut renewals: Vec<Timestamp> =
        certificates::authority_renewal(rule, &authority).into_iter().collect();
    state.terms.extend(Term::of_authority(&authority_name, rule, &authority));
    let mut identity = None;
    let mut problems = Vec::new();
    for leaf in leaves(&name, namespace, servers) {
        let found = api.get_opt(&leaf.secret).await?;
        let strange = found.as_ref().is_some_and(|s| s.labels().get(names::LABEL_CLUSTER) != Some(&name));
        if strange {
            problems.push(format!(
                "Secret {} exists but was not created for this cluster: delete it",
                leaf.secret
            ));
            continue;
        }
        let mut data = found.as_ref().and_then(|s| s.data.clone());
        let due = certificates::due(now, rule, &authority, &leaf, data.as_ref());
        let fresh = match &due {
            Due::Keep(_) => None,
            Due::Bundle(_) => data.clone().map(|mut data| {
                data.insert(names::tls::AUTHORITY.to_owned(), ByteString(authority.bundle().into_bytes()));
                data
            }),
            Due::Issue(_) => Some(certificates::secret_data(&authority.issue(&leaf, now, rule)?, &authority)),
        };
        match due {
            Due::Keep(renewal) | Due::Bundle(renewal) => renewals.push(renewal),
            Due::Issue(why) if !writing => {
                problems.push(format!("{}: {why}, and spec.paused is true", leaf.secret))
            }
            Due::Issue(why) => {
                renewals.push(now + rule.validity - rule.renew_before);
                tracing::info!(secret = leaf.secret, why, "certificate issued");
            }
        }
        if let Some(fresh) = fresh
            && writing
        {
            write_secret(
                context,
                cluster,
                &api,
                found,
                &leaf.secret,
                leaf.instance.as_deref(),
                fresh.clone(),
            )
            .await?;
            data = Some(fresh);
        }
        state.terms.extend(data.as_ref().and_then(|data| Term::of_leaf(&leaf.secret, rule, data)));
        if let Some(instance) = &leaf.instance {
            state.issued.push(instance.clone());
        }
        if leaf.secret == names::operator_secret(&name) {
            identity = data.as_ref().and_then(|d| Identity::new(d).ok());
        }
    }
    state.renewal = renewals.into_iter().min();
    state.problem = (!problems.is_empty()).then(|| problems.join("; "));
    Ok((state, identity))
}

/// Removes the credentials of destroyed volumes.
pub(super) async fn forget_credentials(
    context: &Context,
    cluster: &StorageCluster,
) -> Result<(), ReconcileError> {
    let api: Api<Secret> = Api::namespaced(context.client.clone(), &context.settings.namespace);
    let selector = format!(
        "{}={},{}={}",
        names::LABEL_MANAGED_BY,
        names::MANAGED_BY_DRIVER,
        names::LABEL_CLUSTER,
        cluster.name_any()
    );
    for secret in api.list_metadata(&kube::api::ListParams::default().labels(&selector)).await?.items {
        // The driver's finalizer keeps the Secret for as long as its volume exists.
        let finalizers = secret.finalizers();
        let kept: Vec<&String> = finalizers.iter().filter(|f| *f != names::FINALIZER_VOLUME).collect();
        if kept.len() < finalizers.len() {
            let patch = json!({ "metadata": { "uid": secret.uid(), "finalizers": kept } });
            let patched =
                api.patch_metadata(&secret.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await;
            match patched {
                Err(kube::Error::Api(status)) if status.code == 404 => continue,
                other => other?,
            };
        }
        match api.delete(&secret.name_any(), &DeleteParams::default()).await {
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            other => {
                other?;
            }
        }
    }
    Ok(())
}

/// Returns every certificate that must exist.
fn leaves(cluster: &str, namespace: &str, servers: &[(String, IpAddr)]) -> Vec<Leaf> {
    let client = |secret: String, name: &str| Leaf {
        secret,
        name: name.to_owned(),
        dns: [name.to_owned()].into(),
        ips: std::collections::BTreeSet::new(),
        server: false,
        instance: None,
    };
    let mut leaves = vec![
        client(names::operator_secret(cluster), names::CLIENT_OPERATOR),
        client(names::driver_secret(cluster), names::CLIENT_DRIVER),
    ];
    leaves.extend(servers.iter().map(|(instance, address)| Leaf {
        secret: names::server_secret(instance),
        name: instance.clone(),
        dns: [names::admin_server_name(instance, namespace)].into(),
        ips: [*address].into(),
        server: true,
        instance: Some(instance.clone()),
    }));
    leaves
}

/// Creates a Secret, or replaces the one that was read, with its resource version, so that two operators never overwrite
/// each other's keys.
async fn write_secret(
    context: &Context,
    cluster: &StorageCluster,
    api: &Api<Secret>,
    found: Option<Secret>,
    name: &str,
    instance: Option<&str>,
    data: BTreeMap<String, ByteString>,
) -> Result<(), ReconcileError> {
    let verb = if found.is_some() { "update" } else { "create" };
    context.metrics.writes.get_or_create(&Written { kind: "Secret".to_owned(), verb }).inc();
    if let Some(mut secret) = found {
        secret.data = Some(data);
        api.replace(name, &PostParams::default(), &secret).await?;
        return Ok(());
    }
    let mut secret: Secret = serde_json::from_value(json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": {
            "name": name,
            "namespace": context.settings.namespace,
            "labels": labels(&cluster.name_any(), instance),
        },
    }))?;
    secret.data = Some(data);
    api.create(&PostParams::default(), &secret).await?;
    Ok(())
}
