//! The resources for verdicts: from manifests in files, or from a datastore.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, bail};
use serde_json::{Value, json};
use tortie_api::manifest::{Settled, Skipped};
use tortie_api::report::ReportedCondition;
use tortie_api::{Key, Kind, Resource};
use tortie_oracle::{Peer, Snapshot, Stored};
use tortie_store::{Store, StoreError};

use crate::filenames::Filenames;
use crate::store::{StoreArguments, list};
use crate::{completed, manifests, output};

/// The source of the resources.
#[derive(clap::Args)]
#[command(mut_arg("files", |files| files.help("Manifests instead of a datastore: files, folders of them, or - for standard input")))]
pub(crate) struct Source {
    #[command(flatten)]
    filenames: Filenames,
    #[command(flatten)]
    store: StoreArguments,
}

/// The resources, with notes for the user.
#[derive(Default)]
pub(crate) struct Read {
    pub(crate) snapshot: Snapshot,
    /// Objects that no verdict depends on.
    skipped: Vec<Skipped>,
    /// Additions and changes that were made to answer.
    notes: Vec<String>,
}

impl Source {
    /// Reads the resources, and prints notes. `None` if there is a problem with the manifests: every problem has then
    /// been printed.
    pub(crate) fn read(&self) -> anyhow::Result<Option<Read>> {
        if !self.filenames.is_empty() {
            return of_files(&self.filenames);
        }
        of_store(&self.store).map(Some)
    }
}

/// The resources of a datastore.
pub(crate) fn of_store(store: &StoreArguments) -> anyhow::Result<Read> {
    crate::runtime()?.block_on(async {
        let store = store.open().await?;
        Ok(Read { snapshot: of_open(&*store, |_| {}).await?, ..Read::default() })
    })
}

/// The resources of a datastore, each after a change.
pub(crate) async fn of_open(
    store: &dyn Store,
    change: impl Fn(&mut tortie_store::Stored),
) -> Result<Snapshot, StoreError> {
    let mut snapshot = Snapshot::new();
    for kind in Kind::all().filter(|kind| matters(*kind)) {
        for mut stored in list(store, kind).await? {
            change(&mut stored);
            snapshot.insert(stored.key, stored.value, None);
        }
    }
    Ok(snapshot)
}

/// The conditions in node reports: node and condition.
pub(crate) fn reports(snapshot: &Snapshot) -> Vec<(String, ReportedCondition)> {
    let of_node = |(key, stored): (&Key, &Stored)| match &stored.resource {
        Ok(Resource::NodeReport(report)) => {
            let conditions = report.status.conditions.iter();
            Some(conditions.map(|condition| (key.name.clone(), condition.clone())).collect::<Vec<_>>())
        }
        _ => None,
    };
    snapshot.iter().filter_map(of_node).flatten().collect()
}

/// The resources of manifests, completed to those of a cluster. Additions are noted.
pub(crate) fn of_files(filenames: &Filenames) -> anyhow::Result<Option<Read>> {
    let Some(Settled { objects, skipped, notes }) = manifests::read_cluster(filenames)? else {
        return Ok(None);
    };
    let mut read = Read { snapshot: Snapshot::new(), skipped, notes };
    let tiers: BTreeSet<&str> =
        manifests::unknown_tiers(std::iter::empty(), &objects).map(|(_, tier)| tier).collect();
    read.notes.extend(tiers.into_iter().map(|tier| {
        format!("tier {tier} is not in the files: its policies are taken to stand after all tiers, and to deny at their end")
    }));
    for object in objects {
        read.snapshot.insert(object.key, object.value, Some((object.origin, object.lines)));
    }
    read.notes.extend(completed::complete(&mut read.snapshot));
    read.tell();
    Ok(Some(read))
}

impl Read {
    fn tell(&self) {
        let mut kinds: BTreeMap<&str, u64> = BTreeMap::new();
        for skipped in &self.skipped {
            *kinds.entry(&skipped.kind).or_default() += 1;
        }
        if !kinds.is_empty() {
            let kinds: Vec<String> = kinds.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
            output::error_line(&format!("note: skipped, as no verdict depends on it: {}", kinds.join(", ")));
        }
        for note in &self.notes {
            output::error_line(&format!("note: {note}"));
        }
    }

    /// Adds a note, and prints it.
    pub(crate) fn note(&mut self, note: String) {
        output::error_line(&format!("note: {note}"));
        self.notes.push(note);
    }

    /// Adds the notes to an answer in JSON.
    pub(crate) fn add_to(&self, document: &mut Value) {
        let one = |skipped: &Skipped| {
            json!({
                "apiVersion": skipped.api_version, "kind": skipped.kind, "name": skipped.name,
                "place": skipped.origin.to_string(),
            })
        };
        if let Some(fields) = document.as_object_mut() {
            fields.insert("skipped".to_owned(), self.skipped.iter().map(one).collect());
            fields.insert("notes".to_owned(), json!(self.notes));
        }
    }
}

/// Whether verdicts may depend on objects of this kind.
pub(crate) fn matters(kind: Kind) -> bool {
    let bookkeeping =
        [Kind::IpamBlock, Kind::BlockAffinity, Kind::IpamHandle, Kind::IpamConfig, Kind::IpReservation];
    !bookkeeping.contains(&kind)
}

/// Parses one end of a flow: `namespace/pod`, `pod` (in the given namespace), `node/NAME`, an address, or
/// `networkset/NAMESPACE/NAME` and `globalnetworkset/NAME`, which stand for the first address of their first network.
pub(crate) fn peer(snapshot: &Snapshot, text: &str, namespace: &str) -> anyhow::Result<Peer> {
    if let Ok(address) = text.parse() {
        return Ok(Peer::Address(address));
    }
    let parts: Vec<&str> = text.split('/').collect();
    match parts.as_slice() {
        ["node", name] => Ok(Peer::Node((*name).to_owned())),
        ["networkset", namespace, name] => of_set(snapshot, Kind::NetworkSet, namespace, name),
        ["globalnetworkset", name] => of_set(snapshot, Kind::GlobalNetworkSet, "", name),
        [name] => Ok(Peer::Pod { namespace: namespace.to_owned(), name: (*name).to_owned() }),
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
