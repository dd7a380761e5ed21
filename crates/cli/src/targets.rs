//! The objects that a command names: `pods`, `pods,services`, `pod a b`, `pod/a service/b`, `all`.

use anyhow::{Context, bail};
use tortie_api::{Key, Kind};
use tortie_store::{Interest, Scope, Store, StoreError, Stored};

use crate::filter::{FieldFilter, LabelFilter};
use crate::manifests::other_name;
use crate::output;

/// The similarity of words that may be meant for each other, from 0 to 1.
const SIMILAR: f64 = 0.88;
/// The word for the kinds that decide about packets.
const ALL: &str = "all";

/// One kind, and the wanted names; no names stand for all objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) kind: Kind,
    pub(crate) names: Vec<String>,
}

impl Target {
    /// Whether the object is wanted.
    pub(crate) fn includes(&self, key: &Key) -> bool {
        key.kind == self.kind && (self.names.is_empty() || self.names.iter().any(|name| is_named(key, name)))
    }
}

/// Whether the object has this name; a policy in tier default has two.
pub(crate) fn is_named(key: &Key, name: &str) -> bool {
    key.name == name || other_name(key).is_some_and(|other| other.name == name)
}

/// Parses the words of a command line, as kubectl does.
///
/// # Errors
/// A word is no kind of object, or the forms are mixed.
pub(crate) fn parse(words: &[String]) -> anyhow::Result<Vec<Target>> {
    let [first, rest @ ..] = words else {
        bail!(
            "name a kind of object, such as pods, networkpolicies or pod/NAME; the kinds are {}",
            all_kinds()
        )
    };
    if first.contains('/') {
        return of_pairs(words);
    }
    let mut targets: Vec<Target> = Vec::new();
    for kind in kinds(first)? {
        if !targets.iter().any(|target| target.kind == kind) {
            targets.push(Target { kind, names: rest.to_vec() });
        }
    }
    Ok(targets)
}

/// `KIND/NAME`, each of any kind. Objects of one kind that follow each other are one target.
fn of_pairs(words: &[String]) -> anyhow::Result<Vec<Target>> {
    let mut targets: Vec<Target> = Vec::new();
    for word in words {
        // The name of an affinity contains a slash, too.
        let pair = word.split_once('/').filter(|(kind, name)| !kind.is_empty() && !name.is_empty());
        let Some((kind, name)) = pair else {
            bail!("{word:?} is not of the form KIND/NAME, as other arguments are; use one form for all")
        };
        let kind = kind_of(kind)?;
        match targets.last_mut().filter(|target| target.kind == kind) {
            Some(target) => target.names.push(name.to_owned()),
            None => targets.push(Target { kind, names: vec![name.to_owned()] }),
        }
    }
    Ok(targets)
}

fn kinds(words: &str) -> anyhow::Result<Vec<Kind>> {
    let mut kinds = Vec::new();
    for word in words.split(',').filter(|word| !word.is_empty()) {
        match word {
            ALL => kinds.extend(Kind::all().filter(|kind| decides(*kind))),
            word => kinds.push(kind_of(word)?),
        }
    }
    if kinds.is_empty() {
        bail!("{words:?} names no kind of object; the kinds are {}", all_kinds());
    }
    Ok(kinds)
}

/// Whether `all` includes the kind: pods, Services, policies and what policies refer to.
fn decides(kind: Kind) -> bool {
    let others = [
        Kind::Pod,
        Kind::Service,
        Kind::Tier,
        Kind::NetworkSet,
        Kind::GlobalNetworkSet,
        Kind::HostEndpoint,
        Kind::IpPool,
    ];
    // ReplicaSets are those of Deployments, almost always.
    let is_workload = kind.is_workload() && kind != Kind::ReplicaSet;
    kind.is_policy() || is_workload || others.contains(&kind)
}

fn kind_of(word: &str) -> anyhow::Result<Kind> {
    // As -o name prints it: networkpolicy.projectcalico.org.
    let of_group = |word: &str| {
        let (name, group) = word.split_once('.')?;
        Kind::all().find(|kind| {
            kind.name().eq_ignore_ascii_case(name)
                && kind.api_version().split_once('/').is_some_and(|(known, _)| known == group)
        })
    };
    Kind::from_word(word).or_else(|| of_group(word)).with_context(|| match similar(word) {
        Some(known) => format!("{word:?} is no kind of object; did you mean {known}?"),
        None => format!("{word:?} is no kind of object; the kinds are {}", all_kinds()),
    })
}

/// The word for a kind that is most like this one.
fn similar(word: &str) -> Option<&'static str> {
    let word = word.to_ascii_lowercase();
    let rated = Kind::words().map(|known| (strsim::jaro_winkler(&word, known), known));
    rated.filter(|(rating, _)| *rating >= SIMILAR).max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, known)| known)
}

fn all_kinds() -> String {
    Kind::all().map(Kind::plural).collect::<Vec<_>>().join(", ")
}

/// The objects of a target in a namespace, or in all of them, and the names that do not exist. A kind that the datastore
/// does not have has no objects.
///
/// # Errors
/// The store failed.
pub(crate) async fn read(
    store: &dyn Store,
    target: &Target,
    namespace: Option<&str>,
) -> Result<(Vec<Stored>, Vec<String>), StoreError> {
    let listed = match store.list_all(&interest(target, namespace)).await {
        Err(StoreError::KindAbsent(_)) => Vec::new(),
        listed => listed?.items,
    };
    let items: Vec<Stored> = listed.into_iter().filter(|stored| target.includes(&stored.key)).collect();
    let is_missing = |name: &&String| !items.iter().any(|stored| is_named(&stored.key, name));
    let missing = target.names.iter().filter(is_missing).cloned().collect();
    Ok((items, missing))
}

/// The interest that contains a target.
pub(crate) fn interest(target: &Target, namespace: Option<&str>) -> Interest {
    let scope = match namespace.filter(|_| target.kind.namespaced()) {
        Some(namespace) => Scope::Namespace(namespace.to_owned()),
        None => Scope::All,
    };
    Interest { kind: target.kind, scope }
}

/// Reports that an object does not exist.
pub(crate) fn report_missing(kind: Kind, object: &str) {
    let hint = if kind == Kind::NetworkPolicy { " (a Kubernetes policy is a knp)" } else { "" };
    output::error(&format!("{object} does not exist{hint}"));
}

/// The objects that a command changes: by name, or all that selectors select.
#[derive(clap::Args)]
pub(crate) struct Selection {
    /// The namespace, by default `default`; with -f, that of objects that name none
    #[arg(short, long)]
    pub(crate) namespace: Option<String>,
    /// All namespaces, with --all, -l or --field-selector
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    all_namespaces: bool,
    /// All objects of the kinds
    #[arg(long)]
    all: bool,
    /// The objects with these labels, such as app=web,tier in (a,b),!old
    #[arg(short = 'l', long, value_name = "SELECTOR", conflicts_with = "all")]
    selector: Option<LabelFilter>,
    /// The objects with these fields, such as spec.nodeName=one
    #[arg(long, value_name = "SELECTOR", conflicts_with = "all")]
    field_selector: Option<FieldFilter>,
}

impl Selection {
    /// The keys of the objects. Those that are given by name need not exist.
    ///
    /// # Errors
    /// Neither names nor selectors are given, or both; or the store failed.
    pub(crate) async fn keys(&self, store: &dyn Store, targets: &[Target]) -> anyhow::Result<Vec<Key>> {
        let selects = self.all || self.selector.is_some() || self.field_selector.is_some();
        let mut keys = Vec::new();
        for target in targets {
            let plural = target.kind.plural();
            match (target.names.is_empty(), selects) {
                (true, false) => bail!("which {plural}? Give names, --all, -l or --field-selector"),
                (false, true) => bail!("give either the names of {plural}, or --all, -l or --field-selector"),
                (false, false) if self.all_namespaces => {
                    bail!("--all-namespaces needs --all, -l or --field-selector")
                }
                (false, false) => keys.extend(target.names.iter().map(|name| self.key(target.kind, name))),
                (true, true) => {
                    let namespace = Some(self.namespace()).filter(|_| !self.all_namespaces);
                    let (items, _) = read(store, target, namespace).await?;
                    let selected = items.into_iter().filter(|stored| self.fits(stored));
                    let before = keys.len();
                    keys.extend(selected.map(|stored| stored.key));
                    if keys.len() == before {
                        output::error_line(&format!("no {plural} are selected"));
                    }
                }
            }
        }
        Ok(keys)
    }

    fn namespace(&self) -> &str {
        self.namespace.as_deref().unwrap_or("default")
    }

    fn key(&self, kind: Kind, name: &str) -> Key {
        match kind.namespaced() {
            true => Key::namespaced(kind, self.namespace(), name),
            false => Key::global(kind, name),
        }
    }

    fn fits(&self, stored: &Stored) -> bool {
        self.selector.as_ref().is_none_or(|selector| selector.matches(&stored.value))
            && self.field_selector.as_ref().is_none_or(|selector| selector.matches(&stored.value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_name_kinds_and_objects() {
        let target =
            |kind, names: &[&str]| Target { kind, names: names.iter().map(|&name| name.into()).collect() };
        for (words, expected) in [
            ("pods", vec![target(Kind::Pod, &[])]),
            ("po,svc", vec![target(Kind::Pod, &[]), target(Kind::Service, &[])]),
            ("pods,pod", vec![target(Kind::Pod, &[])]),
            ("pod a b", vec![target(Kind::Pod, &["a", "b"])]),
            ("pod,svc a", vec![target(Kind::Pod, &["a"]), target(Kind::Service, &["a"])]),
            ("pod/a pod/b svc/c", vec![target(Kind::Pod, &["a", "b"]), target(Kind::Service, &["c"])]),
            ("ipamblock 10.0.0.0/26", vec![target(Kind::IpamBlock, &["10.0.0.0/26"])]),
            ("networkpolicy.projectcalico.org/a", vec![target(Kind::NetworkPolicy, &["a"])]),
            ("networkpolicy.networking.k8s.io", vec![target(Kind::KubernetesNetworkPolicy, &[])]),
            ("blockaffinity/n/10.0.0.0/26", vec![target(Kind::BlockAffinity, &["n/10.0.0.0/26"])]),
        ] {
            let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
            assert_eq!(parse(&words).unwrap(), expected, "{words:?}");
        }
        for (words, expected) in [
            ("", "name a kind"),
            ("nonsense", "no kind of object"),
            (",", "names no kind of object"),
            ("pod/a b", "not of the form KIND/NAME"),
            ("pod/", "not of the form"),
            ("pod,nonsense", "no kind of object"),
        ] {
            let words: Vec<String> =
                words.split(' ').filter(|word| !word.is_empty()).map(str::to_owned).collect();
            let error = parse(&words).unwrap_err().to_string();
            assert!(error.contains(expected), "{words:?}: {error}");
        }
    }

    #[test]
    fn all_means_what_decides_about_packets() {
        let kinds: Vec<Kind> = parse(&["all".to_owned()]).unwrap().iter().map(|target| target.kind).collect();
        assert!(kinds.contains(&Kind::Pod) && kinds.contains(&Kind::ClusterNetworkPolicy));
        assert!(kinds.contains(&Kind::CronJob) && kinds.contains(&Kind::ReplicationController));
        assert!(!kinds.contains(&Kind::IpamBlock) && !kinds.contains(&Kind::NodeReport));
        assert!(!kinds.contains(&Kind::ReplicaSet));
    }
}
