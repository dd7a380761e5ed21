//! Requests beyond a role, with real certificates of each role, and messages that are too large.

use std::cell::Cell;

use anyhow::{Context, Result, bail, ensure};
use rand::Rng as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use serde_json::{Value, json};
use tortie_api::calico::WorkloadEndpoint;
use tortie_api::{Key, Kind, Position};
use tortie_store::rpc::Remote;
use tortie_store::{Interest, Source as _, Store as _, StoreError, Version, Write};

use crate::attack::{Attack, Bounds, Outcome};
use crate::service::Service;

/// The description.
pub(crate) const ATTACK: Attack = Attack {
    name: "roles",
    attacker: "the holder of a certificate of a node, of the controllers, of the service itself or of another authority tries each verb on \
               each kind, with names and values that resemble his own, and sends messages of up to 255 MiB",
    holds: "nothing beyond the table of his role succeeds or changes an object; a message that is too large is refused before it is \
            decoded, and the memory of the service stays bounded",
    run,
};

/// What each role may do, written by hand for the tests of the service: columns are a node on objects of its own and of others, and
/// the controllers.
const TABLE: &str = include_str!("../../../crates/store/tests/integration/rpc/roles.txt");
const VERBS: &str = "glwbcud";
/// The node of the certificate.
const NODE: &str = "one";
/// An operator of another authority, and the service itself, whose certificate is for servers: TLS refuses both.
const STRANGERS: [&str; 2] = ["operator-eve", "store"];
/// A certificate of the authority that names no role.
const NO_ROLE: &str = "no-role";
/// Nodes with names that begin or end with it, or look like it.
const OTHERS: [&str; 5] = ["one-more", "on", "not-one", "one.more", "two"];
/// The largest object, and how many of them a message has that an operator may send, and that nobody else may.
const OBJECT_BYTES: usize = 3 << 19;
const OBJECTS: usize = 20;
/// How many MiB the service may need beyond what an operator's largest message costs.
const MORE_MEMORY: u64 = 64;

fn run(bounds: &mut Bounds) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    while bounds.another_round() {
        let clients =
            ["node one", "controllers", "operator ann", "authority --dir other", "operator eve --dir other"];
        let service = Service::start(&bounds.program, 512, &clients)?;
        service.issue(NO_ROLE, NODE)?;
        let random = &mut bounds.random;
        service.run(async || {
            requests(&service, random, &mut outcome).await?;
            messages(&service, &mut outcome).await
        })?;
        service.end()?;
    }
    Ok(outcome)
}

/// A request, and what the table says about it.
#[derive(Debug, Clone)]
struct Request {
    who: &'static str,
    kind: Kind,
    /// The node whose object it is.
    node: &'static str,
    verb: char,
    allowed: bool,
}

/// All requests: each role, kind and verb.
fn all(random: &mut StdRng) -> Result<Vec<Request>> {
    let mut requests = Vec::new();
    let mut kinds = 0;
    for line in TABLE.lines() {
        let cells: Vec<&str> = line.split_whitespace().collect();
        let [plural, own, other, controllers] = cells[..] else {
            bail!("the table of roles has the line {line}")
        };
        let kind = Kind::all().find(|kind| kind.plural().split('.').next() == Some(plural));
        let kind = kind.with_context(|| format!("there is no kind {plural}"))?;
        kinds += 1;
        for verb in VERBS.chars() {
            let mut add = |who, node, may: &str| {
                requests.push(Request { who, kind, node, verb, allowed: may.contains(verb) });
            };
            add("node-one", NODE, own);
            OTHERS.into_iter().for_each(|node| add("node-one", node, other));
            add("controllers", OTHERS[0], controllers);
            add("operator-ann", OTHERS[0], VERBS);
            add(NO_ROLE, OTHERS[0], "");
            STRANGERS.into_iter().for_each(|who| add(who, OTHERS[0], ""));
        }
    }
    ensure!(kinds == Kind::all().count(), "the table of roles has {kinds} kinds");
    requests.shuffle(random);
    Ok(requests)
}

async fn requests(service: &Service, random: &mut StdRng, outcome: &mut Outcome) -> Result<()> {
    let operator = service.operator();
    let names = ["node-one", "controllers", "operator-ann", NO_ROLE, STRANGERS[0], STRANGERS[1]];
    let folder = |name| if name == STRANGERS[0] { "other" } else { "tortie-certs" };
    let clients = names.map(|name| Ok((name, service.client_of(folder(name), name)?)));
    let clients = clients.into_iter().collect::<Result<Vec<_>>>()?;
    for request in all(random)? {
        let (_, client) = clients.iter().find(|(name, _)| *name == request.who).context("no client")?;
        // Each attempt of somebody whom the service does not know costs a handshake.
        if STRANGERS.contains(&request.who) && random.random_range(0..4) > 0 {
            continue;
        }
        let answer = attempt(&operator, client, &request).await?;
        let Request { who, kind, node, verb, allowed } = request;
        let shown = format!("{who} {verb} {kind} of {node}: {}", answer.text);
        if allowed {
            outcome.control(answer.succeeded, &format!("the role may do it, and it fails: {shown}"))?;
            continue;
        }
        outcome.attempts += 1;
        if answer.succeeded || answer.changed {
            outcome.blame(shown);
        } else {
            ensure!(answer.refused, "the attack proves nothing: it fails for another reason: {shown}");
        }
    }
    Ok(())
}

/// An object of the node, where objects of the kind belong to nodes.
fn object(kind: Kind, node: &str) -> (Key, Value) {
    let name = match kind {
        Kind::Node | Kind::NodeReport => node.to_owned(),
        Kind::WorkloadEndpoint => WorkloadEndpoint::name_for(node, "p", "eth0"),
        Kind::BlockAffinity => format!("{node}/10.0.0.0/26"),
        Kind::IpamBlock if node == NODE => "10.0.0.0/26".to_owned(),
        Kind::IpamBlock => "10.0.1.0/26".to_owned(),
        _ => format!("some-{node}"),
    };
    let key = match kind.namespaced() {
        true => Key::namespaced(kind, "default", name),
        false => Key::global(kind, name),
    };
    (key, json!({"metadata": {"name": "n"}, "spec": {"node": node}, "affinity": format!("host:{node}")}))
}

/// What came of a request.
struct Answer {
    succeeded: bool,
    /// It was refused because of the client's role or certificate, not for another reason.
    refused: bool,
    /// The object is not as before.
    changed: bool,
    text: String,
}

/// Tries it. Everything is undone.
async fn attempt(operator: &Remote, client: &Remote, request: &Request) -> Result<Answer> {
    let Request { kind, node, verb, .. } = *request;
    let (key, value) = object(kind, node);
    let interest = if node == NODE { Interest::of_node(kind, node) } else { Interest::all(kind) };
    let (version, position) = match verb {
        'c' => (Version::new("0"), Position(0)),
        _ => {
            let stored = operator.create(&key, value.clone()).await;
            let stored = stored.with_context(|| format!("creating {key}"))?;
            (stored.version, stored.position)
        }
    };
    let changed = json!({"changed": true, "spec": value["spec"], "affinity": value["affinity"]});
    let result = match verb {
        'g' => client.get(&key).await.map(drop),
        'l' => client.list_page(&interest, None).await.map(drop),
        'w' => client.watch(&[interest], position).await.map(drop),
        // A barrier answers for the kinds that the client may read.
        'b' => match client.barrier(&[kind]).await {
            Ok(positions) if positions.of(kind).is_none() => {
                Err(StoreError::Forbidden("no position".to_owned()))
            }
            answer => answer.map(drop),
        },
        'c' => client.create(&key, value.clone()).await.map(drop),
        'u' => client.update(&key, changed, &version).await.map(drop),
        _ => client.delete(&key, Some(&version)).await.map(drop),
    };
    let after = operator.get(&key).await?.map(|stored| stored.value);
    let before = (verb != 'c').then_some(value);
    let _ = operator.delete(&key, None).await;
    let refused = match &result {
        Err(StoreError::Forbidden(_)) => true,
        Err(StoreError::Unavailable(_)) => STRANGERS.contains(&request.who),
        _ => false,
    };
    let text = result.as_ref().map_or_else(ToString::to_string, |()| "it succeeds".to_owned());
    Ok(Answer { succeeded: result.is_ok(), refused, changed: after != before, text })
}

/// An operator's largest message, then the same and larger ones of everybody else.
async fn messages(service: &Service, outcome: &mut Outcome) -> Result<()> {
    let number = Cell::new(0);
    let message = |objects: usize| {
        let object = || {
            number.set(number.get() + 1);
            let key = Key::global(Kind::IpamHandle, format!("large-{}", number.get()));
            Write::Create(key, json!("x".repeat(OBJECT_BYTES - 2)))
        };
        std::iter::repeat_with(object).take(objects).collect::<Vec<_>>()
    };
    let operator = service.client("operator-ann")?;
    let accepted = operator.write_all(message(OBJECTS)).await;
    outcome.control(accepted.is_ok(), &format!("an operator's large message fails: {:?}", accepted.err()))?;
    let before = service.peak_of_memory()?;
    for objects in [OBJECTS, 60, 165] {
        for who in ["node-one", NO_ROLE] {
            let client = service.client(who)?;
            let writes = message(objects);
            let name = writes.first().map(|write| write.key().clone()).context("no object")?;
            let answer = client.write_all(writes).await;
            outcome.attempts += 1;
            let refused = answer.as_ref().is_err_and(|stopped| {
                stopped.error.to_string().contains("too large")
                    || matches!(stopped.error, StoreError::Forbidden(_))
            });
            ensure!(
                answer.is_ok() || refused,
                "the attack proves nothing: it fails for another reason: {answer:?}"
            );
            if answer.is_ok() || service.operator().get(&name).await?.is_some() {
                outcome.blame(format!("a message of {objects} objects of {who} is executed: {answer:?}"));
            }
        }
    }
    let after = service.peak_of_memory()?;
    outcome.notes.push(format!(
        "the service has needed {before} MiB, and {after} MiB with messages that are too large"
    ));
    if after > before + MORE_MEMORY {
        outcome.blame(format!("messages that are too large cost the service {} MiB", after - before));
    }
    Ok(())
}
