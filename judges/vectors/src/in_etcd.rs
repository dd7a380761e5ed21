//! Documents through Tortie's client of a real etcd, and what calicoctl has stored and shown for them.

use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use setup::packages;
use testkit::calico_client;
use tortie_api::manifest::{self, LAST_APPLIED, Object};
use tortie_servers::Etcd as Servers;
use tortie_store::Store;
use tortie_store::etcd::{Etcd, EtcdConfig};

use super::Tally;

const PREFIX: &str = "/calico/resources/";
/// The identity of an object that calicoctl has stored.
const IDENTITY: [(&str, &str); 2] =
    [("uid", "9d6ba87f-0000-4000-8000-000000000000"), ("creationTimestamp", "2026-11-28T00:00:00Z")];

/// A line of the file.
struct Case<'a> {
    object: Object,
    /// The key in etcd, and the value.
    key: &'a str,
    stored: &'a Value,
    shown: &'a Value,
}

/// Returns the number of documents that are stored or shown in another way.
pub(super) fn replay(file: &str, lines: &[Value]) -> Result<usize> {
    let begun = Instant::now();
    packages::install(&packages::SERVER_PACKAGES)?;
    let servers = Servers::start()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut tally = Tally::default();
    runtime.block_on(async {
        let config = EtcdConfig { endpoints: servers.endpoints(), tls: None, login: None };
        let etcd = Etcd::new(config)?;
        for (number, line) in lines.iter().enumerate() {
            let Some(case) = case(file, line) else {
                tally
                    .leave_out("that Tortie's manifest reader refuses (the judge of validation has them)", 1);
                continue;
            };
            tally.cases += 1;
            if let Err(error) = judge(&servers, &etcd, &case).await {
                tally.differences.push(format!("{}: {}: {error:#}", number + 1, case.object.key));
            }
            servers.etcdctl(&["del", "--prefix", PREFIX])?;
        }
        anyhow::Ok(())
    })?;
    tally.close(file, &"etcd", begun)
}

fn case<'a>(file: &str, line: &'a Value) -> Option<Case<'a>> {
    let [object] = <[Object; 1]>::try_from(manifest::read(file, &line["document"].to_string()).ok()?).ok()?;
    let (key, stored) = line["stored"].as_object()?.iter().next()?;
    Some(Case { object, key, stored, shown: &line["shown"] })
}

async fn judge(servers: &Servers, etcd: &Etcd, case: &Case<'_>) -> Result<()> {
    tortie_store::create(etcd, &case.object).await?;
    let mut created = only_entry(etcd, case.key).await?;
    for (field, _) in IDENTITY {
        created["metadata"][field] = case.stored["metadata"][field].clone();
    }
    expect("created", &created, case.stored)?;

    // What calicoctl has stored.
    let mut of_calico = case.stored.clone();
    let mut shown = case.shown.clone();
    for (field, text) in IDENTITY {
        of_calico["metadata"][field] = json!(text);
        shown["metadata"][field] = json!(text);
    }
    servers.etcdctl(&["put", case.key, &of_calico.to_string()])?;
    let read = etcd.get(&case.object.key).await?.context("the object is not found under its name")?;
    if let Some(metadata) = shown["metadata"].as_object_mut() {
        metadata.remove("resourceVersion");
    }
    expect("shown", &read.value, &shown)?;

    let printed = manifest::read("printed", &read.value.to_string());
    let printed = printed.map_err(|problems| anyhow::anyhow!("what is printed is refused: {problems:?}"))?;
    let [printed] = &printed[..] else { bail!("what is printed is {} objects", printed.len()) };
    etcd.apply(printed).await?;
    let mut applied = only_entry(etcd, case.key).await?;
    if let Some(annotations) = applied["metadata"]["annotations"].as_object_mut() {
        annotations.remove(LAST_APPLIED);
        if annotations.is_empty() {
            applied["metadata"].as_object_mut().map(|metadata| metadata.remove("annotations"));
        }
    }
    expect("applied", &applied, &of_calico)?;
    tortie_store::replace(etcd, printed).await?;
    expect("replaced", &only_entry(etcd, case.key).await?, &of_calico)
}

/// The value of the only key, which Calico's client must be able to update.
async fn only_entry(etcd: &Etcd, key: &str) -> Result<Value> {
    let entries = etcd.entries(PREFIX).await?.entries;
    let [entry] = &entries[..] else { bail!("{} keys, not one", entries.len()) };
    if entry.key != key {
        bail!("the key is {}, not {key}", entry.key);
    }
    let value = serde_json::from_str(&entry.value)?;
    let problems = calico_client::problems(key, &value);
    if !problems.is_empty() {
        bail!("{}", problems.join("; "));
    }
    Ok(value)
}

fn expect(what: &str, ours: &Value, expected: &Value) -> Result<()> {
    if ours != expected {
        bail!("{what}\n    ours:   {ours}\n    Calico: {expected}");
    }
    Ok(())
}
