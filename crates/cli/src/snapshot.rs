//! The resources that verdicts follow from: manifests in files, or a datastore.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::path::PathBuf;

use anyhow::{Context, bail};
use serde_json::{Value, json};
use tortie_api::kubernetes::Node;
use tortie_api::report::ReportedCondition;
use tortie_api::{Key, Kind, Resource};
use tortie_policy::oracle::{Peer, Snapshot, Stored};

use crate::store::StoreArguments;
use crate::{manifests, output};

/// Where the resources come from.
#[derive(clap::Args)]
pub(crate) struct Source {
    /// Manifests instead of a datastore: files, folders of them, or - for standard input
    #[arg(short, long = "filename", value_name = "FILE")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    store: StoreArguments,
}

impl Source {
    /// Reads them. `None` if anything is wrong with the manifests: every problem has then been printed.
    pub(crate) fn read(&self) -> anyhow::Result<Option<Snapshot>> {
        if !self.files.is_empty() {
            return of_files(&self.files);
        }
        of_store(&self.store).map(Some)
    }
}

/// The resources of a datastore.
pub(crate) fn of_store(store: &StoreArguments) -> anyhow::Result<Snapshot> {
    let mut snapshot = Snapshot::new();
    crate::runtime()?.block_on(async {
        let store = store.open()?;
        for kind in Kind::all().filter(|kind| matters(*kind)) {
            for stored in store.list(kind).await?.items {
                snapshot.insert(stored.key, stored.value, None);
            }
        }
        Ok(snapshot)
    })
}

impl Source {
    /// What the nodes of a running cluster report: node, and condition.
    pub(crate) fn reports(&self) -> anyhow::Result<Vec<(String, ReportedCondition)>> {
        if !self.files.is_empty() {
            return Ok(Vec::new());
        }
        let listed = crate::runtime()?.block_on(async {
            self.store.open()?.list(Kind::NodeReport).await.map_err(anyhow::Error::from)
        })?;
        let mut told = Vec::new();
        for stored in listed.items {
            if let Ok(Resource::NodeReport(report)) = Resource::read(&stored.key, &stored.value) {
                told.extend(
                    report
                        .status
                        .conditions
                        .into_iter()
                        .map(|condition| (stored.key.name.clone(), condition)),
                );
            }
        }
        Ok(told)
    }
}

/// The resources of manifests, completed to what they would be in a cluster: workloads have a pod, pods have an address,
/// namespaces are there. What is added is told.
pub(crate) fn of_files(files: &[PathBuf]) -> anyhow::Result<Option<Snapshot>> {
    let Some((objects, foreign)) = manifests::read_among_others(files)? else { return Ok(None) };
    let mut snapshot = Snapshot::new();
    for object in objects {
        snapshot.insert(object.key, object.value, Some((object.origin, object.lines)));
    }
    let mut others = BTreeSet::new();
    for object in foreign {
        match pod_of(&object.value) {
            Some((key, pod)) if snapshot.get(&key).is_none() => {
                snapshot.insert(key, pod, Some((object.origin, object.lines)));
            }
            Some(_) => {}
            None => drop(others.insert(object.value["kind"].as_str().unwrap_or_default().to_owned())),
        }
    }
    if !others.is_empty() {
        let kinds: Vec<String> = others.into_iter().collect();
        output::error_line(&format!("note: policy does not depend on {}: left out", kinds.join(", ")));
    }
    add_namespaces(&mut snapshot);
    add_addresses(&mut snapshot);
    Ok(Some(snapshot))
}

/// The pod that a workload (Deployment, DaemonSet, StatefulSet, ReplicaSet, Job, CronJob) makes, under the workload's name.
fn pod_of(workload: &Value) -> Option<(Key, Value)> {
    let template =
        workload.pointer("/spec/template").or(workload.pointer("/spec/jobTemplate/spec/template"))?;
    let metadata = &workload["metadata"];
    let name = metadata["name"].as_str()?;
    let namespace =
        metadata["namespace"].as_str().filter(|namespace| !namespace.is_empty()).unwrap_or("default");
    let labels = template.pointer("/metadata/labels").cloned().unwrap_or_else(|| json!({}));
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": template.get("spec")?,
    });
    Some((Key::namespaced(Kind::Pod, namespace, name), pod))
}

/// Namespaces of which objects are given but which are not given themselves.
fn add_namespaces(snapshot: &mut Snapshot) {
    let used: BTreeSet<String> = snapshot
        .iter()
        .map(|(key, _)| key.namespace.clone())
        .filter(|namespace| !namespace.is_empty())
        .collect();
    for name in used {
        let key = Key::global(Kind::Namespace, &name);
        if snapshot.get(&key).is_none() {
            if name != "default" {
                output::error_line(&format!(
                    "note: namespace {name} is not given: taken as one without labels"
                ));
            }
            snapshot.insert(key, json!({"metadata": {"name": name}}), None);
        }
    }
}

/// Addresses for pods and nodes that have none yet: from 240.0.0.0/4, where nobody has one. Rules by network miss them, but
/// for those of 0.0.0.0/0 and of networks that nobody should have.
fn add_addresses(snapshot: &mut Snapshot) {
    let without = |(key, stored): (&Key, &Stored)| match &stored.resource {
        Ok(Resource::Pod(pod)) if pod.status.pod_ip.is_none() => {
            Some((key.clone(), "/status", stored.clone()))
        }
        Ok(Resource::Node(node)) if node.address().is_none() => {
            Some((key.clone(), "/metadata", stored.clone()))
        }
        _ => None,
    };
    let without: Vec<(Key, &str, Stored)> = snapshot.iter().filter_map(without).collect();
    if !without.is_empty() {
        output::error_line(&format!(
            "note: {} without an address yet: each is asked with one from 240.0.0.0/4",
            output::count(without.len() as u64, "pod or node").replace("pod or nodes", "pods and nodes")
        ));
    }
    for (number, (key, place, mut stored)) in (1u32..).zip(without) {
        let address = Ipv4Addr::from(0xf000_0000 + number).to_string();
        // What was read is a mapping with mappings in it.
        let Some(fields) = stored.value.as_object_mut() else { continue };
        let fields = fields.entry(&place[1..]).or_insert_with(|| json!({}));
        match key.kind {
            Kind::Pod => fields["podIP"] = json!(address),
            _ => fields["annotations"][Node::ADDRESS] = json!(format!("{address}/4")),
        }
        snapshot.insert(key, stored.value, stored.written);
    }
}

/// Whether verdicts may depend on objects of this kind.
fn matters(kind: Kind) -> bool {
    let bookkeeping = [Kind::IpamBlock, Kind::BlockAffinity, Kind::IpamHandle, Kind::IpamConfig];
    !bookkeeping.contains(&kind)
}

/// Reads one end of a flow: `namespace/pod`, `pod` (of namespace `default`), `node/NAME`, an address, or
/// `networkset/NAMESPACE/NAME` and `globalnetworkset/NAME`, which stand for the first address of their first network.
pub(crate) fn peer(snapshot: &Snapshot, text: &str) -> anyhow::Result<Peer> {
    if let Ok(address) = text.parse() {
        return Ok(Peer::Address(address));
    }
    let parts: Vec<&str> = text.split('/').collect();
    match parts.as_slice() {
        ["node", name] => Ok(Peer::Node((*name).to_owned())),
        ["networkset", namespace, name] => of_set(snapshot, Kind::NetworkSet, namespace, name),
        ["globalnetworkset", name] => of_set(snapshot, Kind::GlobalNetworkSet, "", name),
        [name] => Ok(Peer::Pod { namespace: "default".to_owned(), name: (*name).to_owned() }),
        [namespace, name] => Ok(Peer::Pod { namespace: (*namespace).to_owned(), name: (*name).to_owned() }),
        _ => bail!(
            "{text:?} is none of NAMESPACE/POD, node/NAME, an address, networkset/NAMESPACE/NAME, globalnetworkset/NAME"
        ),
    }
}

fn of_set(snapshot: &Snapshot, kind: Kind, namespace: &str, name: &str) -> anyhow::Result<Peer> {
    let key = Key { kind, namespace: namespace.to_owned(), name: name.to_owned() };
    let stored = snapshot.get(&key).with_context(|| format!("{key} does not exist"))?;
    let net = match &stored.resource {
        Ok(Resource::NetworkSet(set) | Resource::GlobalNetworkSet(set)) => set.spec.nets.first(),
        _ => None,
    };
    let tortie_api::Network(net) = net.with_context(|| format!("{key} holds no network"))?;
    Ok(Peer::Address(net.addr()))
}
