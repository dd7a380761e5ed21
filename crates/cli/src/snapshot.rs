//! The resources for verdicts: from manifests in files, or from a datastore.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, bail};
use serde_json::{Value, json};
use tortie_api::manifest::{ClosedPolicy, Settled, Skipped};
use tortie_api::report::ReportedCondition;
use tortie_api::{Key, Kind, Resource};
use tortie_oracle::{Peer, Snapshot, Stored};
use tortie_store::{Store, StoreError};

use crate::doubts::{self, Doubt};
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
    strictness: Strictness,
    #[command(flatten)]
    store: StoreArguments,
}

/// What to do about documents that cannot be read.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct Strictness {
    /// Give no answer if a document is not read that could change a verdict
    #[arg(long)]
    strict: bool,
    /// Leave out documents of this kind, as if no verdict depended on them: KIND or KIND.GROUP
    #[arg(long, value_name = "KIND")]
    skip_kind: Vec<String>,
}

/// The resources, with notes for the user.
#[derive(Default)]
pub(crate) struct Read {
    pub(crate) snapshot: Snapshot,
    /// Objects that no verdict depends on.
    skipped: Vec<Skipped>,
    /// Additions and changes that were made to answer.
    notes: Vec<String>,
    /// What was not read, or is assumed, and could change the answer.
    pub(crate) doubts: Vec<Doubt>,
}

impl Source {
    /// Reads the resources, and prints notes. `None` if there is no answer because of the manifests: every problem has then
    /// been printed.
    pub(crate) fn read(&self) -> anyhow::Result<Option<Read>> {
        if !self.filenames.is_empty() {
            return of_files(&self.filenames, &self.strictness);
        }
        of_store(&self.store).map(Some)
    }

    /// As [`Self::read`], and no answer if `validate` refuses the manifests.
    pub(crate) fn read_valid(&self) -> anyhow::Result<Option<Read>> {
        let Some(read) = self.read()? else { return Ok(None) };
        let refused = read.doubts.iter().filter(|doubt| doubt.is_refused).count() as u64;
        if refused > 0 {
            output::error(&format!("{}; nothing can be said", output::count(refused, "problem")));
            return Ok(None);
        }
        Ok(Some(read))
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

/// The resources of manifests, completed to those of a cluster. Additions, and what was not read, are noted. `None` if
/// something was not read that could change a verdict, and that is not allowed.
pub(crate) fn of_files(filenames: &Filenames, strictness: &Strictness) -> anyhow::Result<Option<Read>> {
    let read = of_settled(manifests::read_cluster(filenames, &strictness.skip_kind)?);
    doubts::tell(&read.doubts);
    read.tell();
    let important = read.doubts.iter().filter(|doubt| doubt.matters()).count() as u64;
    if strictness.strict && important > 0 {
        let documents = output::count(important, "document");
        output::error(&format!(
            "{documents} could change verdicts and cannot be judged; without --strict there is an answer"
        ));
        return Ok(None);
    }
    Ok(Some(read))
}

/// The resources of manifests, completed to those of a cluster.
pub(crate) fn of_settled(settled: Settled) -> Read {
    let Settled { objects, skipped, unread, closed, differing, notes } = settled;
    let doubts = unread.iter().map(Doubt::of_unread).collect();
    let mut read = Read { snapshot: Snapshot::new(), skipped, notes, doubts };
    read.notes.extend(differing.iter().map(|two| format!("{} {}", two.object, two.problem)));
    read.doubts.extend(differing.into_iter().map(Doubt::of_differing));
    let of_tiers: Vec<_> = manifests::unknown_tiers(std::iter::empty(), &objects).collect();
    let tiers: BTreeSet<&str> = of_tiers.iter().map(|(_, tier)| *tier).collect();
    read.notes.extend(tiers.into_iter().map(|tier| {
        format!("tier {tier} is not in the files: its policies are taken to stand after all tiers, and to deny at their end")
    }));
    read.doubts.extend(of_tiers.into_iter().map(|(policy, tier)| Doubt::of_tier(policy, tier)));
    for ClosedPolicy { key, value, origin, lines } in closed {
        read.snapshot.insert(key, value, Some((origin, lines)));
    }
    for object in objects {
        read.snapshot.insert(object.key, object.value, Some((object.origin, object.lines)));
    }
    read.notes.extend(completed::complete(&mut read.snapshot));
    read
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
            fields.insert("doubts".to_owned(), self.doubts.iter().map(Doubt::document).collect());
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
