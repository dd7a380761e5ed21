//! `tortie get`: which objects, in which form, and their changes.

use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::ChildStdout;
use tortie_api::{Key, Kind};
use tortie_store::Store;

use crate::served::support::{Cluster, text_of};

/// Texts that YAML reads as something else, unless they are quoted.
const TRICKY: [&str; 12] = [
    "yes",
    "null",
    "~",
    "1.0",
    "0x10",
    "a: b",
    "# c",
    "- d",
    "",
    " e ",
    "line\nline",
    "2026-11-22T00:00:00Z",
];

async fn shop() -> Cluster {
    let cluster = Cluster::new().await;
    let put = async |key: Key, spec: Value, labels: Value, status: Value| {
        let mut metadata =
            json!({"name": key.name, "labels": labels, "creationTimestamp": "2020-01-01T00:00:00Z"});
        if !key.namespace.is_empty() {
            metadata["namespace"] = json!(key.namespace);
        }
        let object = json!({"apiVersion": key.kind.api_version(), "kind": key.kind.name(),
            "metadata": metadata, "spec": spec, "status": status});
        cluster.put(&key, object).await;
    };
    for (namespace, name, app, node) in
        [("shop", "front", "web", "one"), ("shop", "back", "db", "two"), ("test", "front", "web", "two")]
    {
        let spec = json!({"nodeName": node, "serviceAccountName": "default"});
        let status = json!({"phase": "Running", "podIP": "10.0.0.1"});
        put(Key::namespaced(Kind::Pod, namespace, name), spec, json!({"app": app}), status).await;
    }
    put(Key::global(Kind::Namespace, "shop"), json!({}), json!({}), json!({})).await;
    let service = json!({"clusterIP": "10.96.0.1", "ports": [{"port": 80, "protocol": "TCP"}]});
    put(Key::namespaced(Kind::Service, "shop", "front"), service, json!({}), json!({})).await;
    for (name, order) in [("z-first", 1), ("a-second", 20), ("m-third", 100)] {
        let spec = json!({"order": order, "selector": "all()", "tier": "default"});
        put(Key::global(Kind::GlobalNetworkPolicy, name), spec, json!({}), json!({})).await;
    }
    let policy = json!({"selector": "app == 'db'"});
    put(Key::namespaced(Kind::NetworkPolicy, "shop", "default.allow"), policy, json!({}), json!({})).await;
    cluster
}

/// The exit code and the output of a command line; the words are separated by `|`.
async fn run(cluster: &Cluster, line: &str) -> (Option<i32>, String) {
    let arguments: Vec<&str> = std::iter::once("get").chain(line.split('|')).collect();
    let output = cluster.tortie(&arguments).output().await.unwrap();
    (output.status.code(), text_of(&output))
}

/// Command lines, and their complete output without the spaces that align columns.
#[tokio::test(flavor = "multi_thread")]
async fn objects_are_selected_and_printed_as_requested() {
    let cluster = shop().await;
    for (line, expected) in [
        ("pods|-n|shop|-o|name", "pod/back\npod/front\n"),
        ("pod|front|-o|name", "pod/front\npod/front\n"),
        ("pod/front|service/front|-n|shop|-o|name", "pod/front\nservice/front\n"),
        ("pods,svc|-n|shop|-o|name", "pod/back\npod/front\nservice/front\n"),
        ("po|-A|-l|app=web|-o|name", "pod/front\npod/front\n"),
        ("po|-l|app in (db),!old|-o|name", "pod/back\n"),
        ("po|--field-selector|spec.nodeName=two,metadata.namespace!=test|-o|name", "pod/back\n"),
        (
            "gnp|--sort-by|.spec.order|-o|name",
            "globalnetworkpolicy.projectcalico.org/z-first\nglobalnetworkpolicy.projectcalico.org/a-second\n\
          globalnetworkpolicy.projectcalico.org/m-third\n",
        ),
        ("networkpolicy|allow|-n|shop|-o|name", "networkpolicy.projectcalico.org/default.allow\n"),
        ("networkpolicy|default.allow|-o|jsonpath={.spec.selector}", "app == 'db'"),
        ("pods|-n|shop|-o|jsonpath={.items[*].spec.nodeName}", "two one"),
        ("pod|back|-n|shop|-o|jsonpath={.metadata.name} on {.spec.nodeName}{'\\n'}", "back on two\n"),
        (
            "pods|-o|jsonpath={range .items[*]}{.metadata.namespace}/{.metadata.name} {end}",
            "shop/back shop/front test/front ",
        ),
        (
            "pods|-n|shop|-o|custom-columns=N:.metadata.name,X:.spec.absent,A:.metadata.labels.app",
            "N X A\nback <none> db\nfront <none> web\n",
        ),
        ("pods|-n|shop|--no-headers|-o|custom-columns=N:.metadata.name", "back\nfront\n"),
        (
            "svc",
            "NAMESPACE NAME TYPE CLUSTER-IP EXTERNAL-IP PORTS AGE\nshop front ClusterIP 10.96.0.1 80/TCP AGE\n",
        ),
        ("svc|--no-headers|--show-labels", "shop front ClusterIP 10.96.0.1 80/TCP AGE\n"),
        (
            "po|-n|shop|-o|wide",
            "NAMESPACE NAME STATUS IP NODE MESSAGE ACCOUNT AGE\nshop back Running 10.0.0.1 two default AGE\n\
          shop front Running 10.0.0.1 one default AGE\n",
        ),
        (
            "po,svc,tiers|-n|shop|--show-labels",
            "NAMESPACE NAME STATUS IP NODE MESSAGE AGE LABELS\nshop pod/back Running 10.0.0.1 two AGE app=db\n\
          shop pod/front Running 10.0.0.1 one AGE app=web\n\n\
          NAMESPACE NAME TYPE CLUSTER-IP EXTERNAL-IP PORTS AGE LABELS\nshop service/front ClusterIP 10.96.0.1 80/TCP AGE\n",
        ),
        (
            "pods|-n|absent",
            "NAMESPACE NAME STATUS IP NODE MESSAGE AGE\nno pods in namespace absent, which does not exist\n",
        ),
        ("pods|-n|absent|-o|name", "no pods in namespace absent, which does not exist\n"),
        ("tiers,networksets|-n|shop|-o|name", "no networksets in namespace shop\n"),
        ("networksets|-n|shop|-o|name", "no networksets in namespace shop\n"),
        ("pods|-n|shop|-l|app=nothing|-o|name", "no such pods in namespace shop\n"),
    ] {
        let (code, printed) = run(&cluster, line).await;
        assert_eq!((code, squeezed(&printed)), (Some(0), expected.to_owned()), "{line}");
    }
    let (_, all) = run(&cluster, "all|-n|shop|-o|name").await;
    assert_eq!(all.lines().count(), 7, "{all}");
    for (line, code, expected) in [
        ("pod|front|absent|-n|shop|-o|name", 1, "pod/front\nerror: Pod absent does not exist\n"),
        ("pod/absent", 1, "error: Pod absent does not exist\n"),
        ("pots", 2, "error: \"pots\" is no kind of object"),
        ("pod/a|b", 2, "not of the form KIND/NAME"),
        ("pods|-o|xml", 2, "it is none of wide, json"),
        ("pods|-o|jsonpath={.a", 2, "not closed"),
        ("pods|-l|a in b", 2, "is no name of a label"),
        ("pods|--field-selector|x", 2, "not of the form FIELD=VALUE"),
        ("pods|-w|--sort-by|.a", 2, "cannot be used with"),
    ] {
        let (found, printed) = run(&cluster, line).await;
        assert!(found == Some(code) && printed.contains(expected), "{line}: {found:?} {printed}");
    }
}

/// Without the spaces that align columns, and with `AGE` for the age of the objects.
fn squeezed(text: &str) -> String {
    let is_age = |word: &str| word.strip_suffix('d').is_some_and(|days| days.parse::<u32>().is_ok());
    let line = |line: &str| {
        let words = line.split("  ").map(str::trim).filter(|word| !word.is_empty());
        words.map(|word| if is_age(word) { "AGE" } else { word }).collect::<Vec<_>>().join(" ")
    };
    match text.contains("   ") {
        true => text.lines().map(|text| line(text) + "\n").collect(),
        false => text.to_owned(),
    }
}

/// YAML that is applied again changes nothing, whatever the texts.
#[tokio::test(flavor = "multi_thread")]
async fn yaml_output_is_applied_unchanged() {
    let cluster = Cluster::new().await;
    let data: serde_json::Map<String, Value> =
        TRICKY.iter().enumerate().map(|(number, text)| (format!("a{number}"), json!(text))).collect();
    let key = Key::global(Kind::GlobalNetworkSet, "s");
    let object = json!({"apiVersion": "projectcalico.org/v3", "kind": "GlobalNetworkSet",
        "metadata": {"name": "s", "annotations": data}, "spec": {"nets": ["10.0.0.0/8"]}});
    cluster.put(&key, object.clone()).await;
    for target in ["globalnetworkset/s", "globalnetworksets"] {
        let (code, yaml) = run(&cluster, &format!("{target}|-o|yaml")).await;
        assert_eq!(code, Some(0), "{yaml}");
        let file = cluster.file(&yaml);
        let output = cluster.tortie(&["apply", "-f", file.to_str().unwrap()]).output().await.unwrap();
        assert_eq!(text_of(&output), "GlobalNetworkSet s unchanged\n", "{yaml}");
    }
    let stored = cluster.store.get(&key).await.unwrap().unwrap().value;
    assert_eq!(tortie_store::without_record(stored), object);
}

async fn next_line(lines: &mut Lines<BufReader<ChildStdout>>) -> String {
    let line = tokio::time::timeout(Duration::from_secs(20), lines.next_line()).await;
    line.expect("a line").unwrap().expect("a line").split_whitespace().collect::<Vec<_>>().join(" ")
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_are_shown_as_they_happen() {
    let cluster = shop().await;
    let watch = async |arguments: &[&str]| {
        let mut command = cluster.tortie(arguments);
        let mut child = command.stdout(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        (child, lines)
    };
    let (_names, mut names) =
        watch(&["get", "pods,svc", "-n", "shop", "-l", "app!=db", "-w", "-o", "name"]).await;
    let (_events, mut events) =
        watch(&["get", "po", "-n", "shop", "-w", "--output-watch-events", "--no-headers"]).await;
    let (_rows, mut rows) = watch(&["get", "gnp", "-w"]).await;
    assert_eq!(next_line(&mut names).await, "pod/front");
    assert_eq!(next_line(&mut names).await, "service/front");
    assert!(next_line(&mut events).await.starts_with("ADDED shop back Running"));
    assert!(next_line(&mut events).await.starts_with("ADDED shop front Running"));
    assert_eq!(next_line(&mut rows).await, "NAME TIER ORDER SELECTOR AGE");
    for expected in ["a-second", "m-third", "z-first"] {
        assert!(next_line(&mut rows).await.starts_with(expected));
    }

    let key = Key::namespaced(Kind::Pod, "shop", "back");
    let mut pod = cluster.store.get(&key).await.unwrap().unwrap().value;
    pod["metadata"]["labels"] = json!({"app": "web"});
    pod["status"]["phase"] = json!("Failed");
    cluster.put(&key, pod).await;
    assert_eq!(next_line(&mut names).await, "pod/back", "the selector selects it now");
    assert!(next_line(&mut events).await.starts_with("MODIFIED shop back Failed"));
    cluster.store.delete(&key, None).await.unwrap();
    assert_eq!(next_line(&mut names).await, "pod/back");
    assert!(next_line(&mut events).await.starts_with("DELETED shop back Failed"));
    cluster.store.delete(&Key::global(Kind::GlobalNetworkPolicy, "m-third"), None).await.unwrap();
    assert!(next_line(&mut rows).await.starts_with("m-third default 100 all()"));
}
