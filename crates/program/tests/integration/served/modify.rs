//! `tortie create`, `replace`, `patch`, `edit`, `label`, `annotate` and `delete`, one command after another on one datastore.

use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_store::Store;

use crate::served::support::{Cluster, text_of};

const POLICIES: &str = "
apiVersion: projectcalico.org/v3
kind: NetworkPolicy
metadata: {name: web, namespace: shop, labels: {team: a}}
spec: {selector: app == 'web', types: [Ingress]}
---
apiVersion: projectcalico.org/v3
kind: NetworkPolicy
metadata: {name: db, namespace: shop, labels: {team: b}}
spec: {selector: app == 'db', order: 10}
---
apiVersion: projectcalico.org/v3
kind: GlobalNetworkSet
metadata: {name: office}
spec: {nets: [192.0.2.0/24]}
";

/// The exit code and the output of a command line; the words are separated by `|`.
async fn run(cluster: &Cluster, line: &str) -> (i32, String) {
    let output = cluster.tortie(&line.split('|').collect::<Vec<_>>()).output().await.unwrap();
    (output.status.code().unwrap(), text_of(&output))
}

async fn expect(cluster: &Cluster, table: &[(&str, i32, &str)]) {
    for (line, code, expected) in table {
        let (found, printed) = run(cluster, line).await;
        let is_expected = match expected.ends_with('\n') {
            true => printed == *expected,
            false => printed.contains(expected),
        };
        assert!(found == *code && is_expected, "{line}: {found}, expected {expected:?}: {printed}");
    }
}

async fn stored(cluster: &Cluster, kind: Kind, name: &str) -> Option<Value> {
    let namespace = if kind.namespaced() { "shop" } else { "" };
    let key = Key::namespaced(kind, namespace, name);
    cluster.store.get(&key).await.unwrap().map(|stored| stored.value)
}

/// Objects that manifests no longer contain are deleted only with their labels, kinds and namespaces.
#[tokio::test(flavor = "multi_thread")]
async fn objects_that_left_the_manifests_are_pruned() {
    let cluster = Cluster::new().await;
    let policy = |name: &str, namespace: &str, part: &str| {
        format!(
            "---\napiVersion: projectcalico.org/v3\nkind: NetworkPolicy\n\
             metadata: {{name: {name}, namespace: {namespace}, labels: {{part: {part}}}}}\nspec: {{selector: all()}}\n"
        )
    };
    let all = ["a", "b"].map(|name| policy(name, "shop", "one")).concat();
    let others = policy("other", "shop", "two") + &policy("elsewhere", "jobs", "one");
    let set = "---\napiVersion: projectcalico.org/v3\nkind: GlobalNetworkSet\nmetadata: {name: s, labels: {part: one}}\nspec: {}\n";
    let file = cluster.file(&format!("{all}{others}{set}")).display().to_string();
    expect(&cluster, &[(&format!("apply|-f|{file}"), 0, "created")]).await;
    cluster.file(&policy("a", "shop", "one"));
    let prune = |more: &str| format!("apply|-f|{file}|--prune{more}");
    expect(
        &cluster,
        &[
            (&prune(""), 2, "--selector"),
            (&prune("|-l|part=two"), 2, "does not have the labels of --prune"),
            (&prune("|-l|part=one|--dry-run"), 0, "NetworkPolicy shop/b would be pruned"),
        ],
    )
    .await;
    assert!(stored(&cluster, Kind::NetworkPolicy, "b").await.is_some());
    let expected = "NetworkPolicy shop/a unchanged\nNetworkPolicy shop/b pruned\n";
    expect(&cluster, &[(&prune("|-l|part=one"), 0, expected)]).await;
    expect(&cluster, &[("get|networkpolicies,gns|-o|name", 0, "globalnetworkset.projectcalico.org/s")]).await;
    let left = run(&cluster, "get|networkpolicies|-o|jsonpath={.items[*].metadata.name}").await;
    assert_eq!(left, (0, "elsewhere a other".to_owned()));
    cluster.file("apiVersion: v1\nkind: Namespace\nmetadata: {name: shop, labels: {part: one}}\n");
    expect(&cluster, &[(&prune("|-l|part=one"), 0, "namespaces are not pruned")]).await;
    cluster.file(&policy("a", "shop", "one"));
    let replace = format!("replace|-f|{file}|--prune|-l|part=one");
    expect(&cluster, &[(&replace, 2, "--prune has an effect with apply only")]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_are_created_changed_and_deleted_as_requested() {
    let cluster = Cluster::new().await;
    let file = cluster.file(POLICIES).display().to_string();
    let on_file = |verb: &str| format!("{verb}|-f|{file}");
    expect(
        &cluster,
        &[
            (&on_file("apply|--dry-run"), 0, "NetworkPolicy shop/web created (dry run)"),
            (&on_file("replace"), 2, "m.yml:2: NetworkPolicy shop/web does not exist"),
        ],
    )
    .await;
    assert_eq!(stored(&cluster, Kind::NetworkPolicy, "web").await, None);
    expect(
        &cluster,
        &[
            (&on_file("create"), 0, "NetworkPolicy shop/web created"),
            (&on_file("create"), 2, "NetworkPolicy shop/web exists already"),
            (&on_file("apply|--dry-run"), 0, "NetworkPolicy shop/web unchanged (dry run)"),
            (&on_file("replace"), 0, "NetworkPolicy shop/db unchanged"),
        ],
    )
    .await;

    expect(
        &cluster,
        &[
            ("label|networkpolicy/web|-n|shop|tier=front|team-", 0, "NetworkPolicy shop/web changed\n"),
            ("label|networkpolicy/web|-n|shop|tier=front", 0, "NetworkPolicy shop/web unchanged\n"),
            ("label|networkpolicy/web|-n|shop|tier=back", 1, "--overwrite replaces it"),
            ("label|networkpolicy/web|-n|shop|tier=back|--overwrite", 0, "changed"),
            (
                "label|networkpolicies|--all|-n|shop|all=yes",
                0,
                "NetworkPolicy shop/db changed\nNetworkPolicy shop/web changed\n",
            ),
            (
                "label|networkpolicies|-n|shop|x=y",
                2,
                "which networkpolicies? Give names, --all, -l or --field-selector",
            ),
            ("label|networkpolicies|web|--all|-n|shop|x=y", 2, "give either the names"),
            ("label|networkpolicy/web|-n|shop", 2, "nothing to change"),
            ("label|networkpolicy/absent|-n|shop|x=y", 1, "NetworkPolicy shop/absent: it does not exist"),
            ("annotate|gns|office|note=of the office", 0, "GlobalNetworkSet office changed\n"),
            ("label|nodereport/one|x=y", 2, "is written by the node's agent"),
            (
                "label|networkpolicy/web|-n|shop|x=y|--dry-run",
                0,
                "NetworkPolicy shop/web changed (dry run)\n",
            ),
            ("label|networkpolicy/web|-n|shop|tier=back|--dry-run", 0, "NetworkPolicy shop/web unchanged\n"),
            ("annotate|gns|office|note-|--dry-run", 0, "GlobalNetworkSet office changed (dry run)\n"),
            (
                "patch|networkpolicy|web|-n|shop|-p|{metadata: {labels: null}}|--dry-run",
                0,
                "changed (dry run)",
            ),
            ("patch|networkpolicy|web|-n|shop|-p|{spec: {oder: 1}}|--dry-run", 1, "unknown field `oder`"),
        ],
    )
    .await;
    let web = stored(&cluster, Kind::NetworkPolicy, "web").await.unwrap();
    assert_eq!(web["metadata"]["labels"], json!({"tier": "back", "all": "yes"}));
    let office = stored(&cluster, Kind::GlobalNetworkSet, "office").await.unwrap();
    assert_eq!(office["metadata"]["annotations"], json!({"note": "of the office"}));

    expect(
        &cluster,
        &[
            ("patch|networkpolicy|db|-n|shop|-p|{spec: {order: 20, selector: null}}", 0, "changed"),
            ("patch|networkpolicy|db|-n|shop|-p|{\"spec\": {\"order\": 20}}", 0, "unchanged"),
            ("patch|networkpolicy/db|-n|shop|--type|json|-p|[{op: add, path: /spec/types, value: [Egress]}]", 0, "changed"),
            ("patch|networkpolicy/db|-n|shop|--type|json|-p|[{op: test, path: /spec/order, value: 1}]", 1, "value did not match"),
            ("patch|networkpolicy/db|-n|shop|-p|{spec: {selectr: x}}", 1, "unknown field `selectr`"),
            ("patch|networkpolicy/db|-n|shop|-p|{spec: {tier: nosuch}}", 1, "tier nosuch does not exist"),
            ("patch|networkpolicy/db|-n|shop|-p|{metadata: {name: other}}", 1, "cannot be changed"),
            ("patch|networkpolicy/db|-n|shop|-p|[1]", 2, "an object is expected"),
            ("patch|networkpolicy/db|-n|shop", 2, "required"),
        ],
    )
    .await;
    let db = stored(&cluster, Kind::NetworkPolicy, "db").await.unwrap();
    assert_eq!(db["spec"], json!({"order": 20, "types": ["Egress"]}));

    expect(
        &cluster,
        &[
            (
                "delete|networkpolicies|-l|tier=back|-n|shop|--dry-run",
                0,
                "NetworkPolicy shop/web would be deleted\n",
            ),
            ("delete|networkpolicies|-l|tier=back|-A", 0, "NetworkPolicy shop/web deleted\n"),
            ("delete|networkpolicy/web|gns/office|-n|shop", 1, "GlobalNetworkSet office deleted"),
            (
                "delete|networkpolicy|web|-n|shop",
                1,
                "NetworkPolicy shop/web does not exist (a Kubernetes policy is a knp)",
            ),
            ("delete|networkpolicy|web|-n|shop|--ignore-not-found", 0, ""),
            ("delete|networkpolicies", 2, "which networkpolicies?"),
            ("delete|networkpolicies|--all|-n|shop", 0, "NetworkPolicy shop/db deleted\n"),
            ("delete|networkpolicies|--all|-n|shop", 0, ""),
        ],
    )
    .await;
}

/// A change during which another writer changes the object, too.
const MEANWHILE: &str = "s/order: 30/order: 40/";

#[tokio::test(flavor = "multi_thread")]
async fn an_object_is_changed_in_an_editor() {
    let cluster = Cluster::new().await;
    let file = cluster.file(POLICIES).display().to_string();
    assert_eq!(run(&cluster, &format!("apply|-f|{file}")).await.0, 0);
    let script = format!("{}/editor", cluster.folder());
    for (change, code, expected) in [
        ("s/order: 10/order: 30/", 0, "NetworkPolicy shop/db changed\n"),
        ("s/nothing/x/", 0, "NetworkPolicy shop/db unchanged\n"),
        ("s/order: 30/order: [/", 1, "the edited object"),
        ("s/order:/ordr:/", 1, "unknown field `ordr`"),
        ("s/uid: .*/uid: x/", 1, "metadata.uid cannot be changed"),
        (MEANWHILE, 1, "somebody else has changed it meanwhile"),
    ] {
        // Another writer is faster.
        let other = match change {
            MEANWHILE => {
                format!("{} label networkpolicy/db -n shop by=other\n", env!("CARGO_BIN_EXE_tortie"))
            }
            _ => String::new(),
        };
        let text = format!("#!/bin/sh\n{other}[ $1 = -w ] && sed -i '{change}' \"$2\"\n");
        testkit::executables::write_script(std::path::Path::new(&script), &text);
        let mut command = cluster.tortie(&["edit", "networkpolicy/db", "-n", "shop"]);
        let output = command.env("KUBE_EDITOR", format!("{script} -w")).output().await.unwrap();
        let printed = text_of(&output);
        assert!(output.status.code() == Some(code) && printed.contains(expected), "{change}: {printed}");
        let kept = printed.lines().find_map(|line| line.strip_prefix("what you wrote is in "));
        assert_eq!(kept.is_some(), code != 0, "{printed}");
        if let Some(path) = kept {
            assert!(std::fs::read_to_string(path).unwrap().contains("app == 'db'"));
            std::fs::remove_file(path).unwrap();
        }
    }
    std::fs::write(&script, "#!/bin/sh\nsed -i 's/order: 30/order: 50/' \"$1\"\n").unwrap();
    let mut command = cluster.tortie(&["edit", "networkpolicy/db", "-n", "shop", "--dry-run"]);
    let output = command.env("KUBE_EDITOR", &script).output().await.unwrap();
    assert_eq!(text_of(&output), "NetworkPolicy shop/db changed (dry run)\n");
    let mut command = cluster.tortie(&["edit", "networkpolicy/db", "-n", "shop"]);
    let output = command.env_remove("KUBE_EDITOR").env("EDITOR", "/bin/false").output().await.unwrap();
    assert!(!output.status.success() && text_of(&output).contains("nothing was changed"));
    assert_eq!(stored(&cluster, Kind::NetworkPolicy, "db").await.unwrap()["spec"]["order"], 30);
}

/// A policy in tier default has two names; others have one.
#[tokio::test(flavor = "multi_thread")]
async fn only_policies_of_tier_default_have_two_names() {
    let cluster = Cluster::new().await;
    let policy = |name: &str, tier: &str| {
        format!(
            "---\napiVersion: projectcalico.org/v3\nkind: NetworkPolicy\nmetadata: {{name: {name}, namespace: shop}}\nspec: {{tier: {tier}, selector: all()}}\n"
        )
    };
    let tier = "apiVersion: projectcalico.org/v3\nkind: Tier\nmetadata: {name: sec}\nspec: {order: 1}\n";
    let file = cluster
        .file(&[tier, &policy("foo", "sec"), &policy("bar", "default")].concat())
        .display()
        .to_string();
    expect(&cluster, &[(&format!("apply|-f|{file}"), 0, "created")]).await;
    cluster.file(&[policy("bar", "default"), policy("default.bar", "default")].concat());
    expect(
        &cluster,
        &[
            (&format!("apply|-f|{file}"), 2, "the manifests have it under its other name, too"),
            ("patch|np|default.foo|-n|shop|-p|{spec: {order: 5}}", 1, "it does not exist"),
            ("patch|np|default.bar|-n|shop|-p|{spec: {order: 5}}", 0, "changed"),
            ("patch|np|bar|-n|shop|-p|{metadata: {uid: x}}", 1, "metadata.uid cannot be changed"),
            ("patch|np|bar|-n|shop|-p|{metadata: {resourceVersion: '7'}}", 1, "cannot be changed"),
            ("get|networkpolicy.projectcalico.org/bar|-o|name", 0, "networkpolicy.projectcalico.org/bar\n"),
            (&format!("delete|-f|{file}|-l|a=b"), 2, "cannot be used with"),
            (&format!("delete|-f|{file}|-n|other"), 2, "namespace other is wanted"),
        ],
    )
    .await;
    assert!(stored(&cluster, Kind::NetworkPolicy, "bar").await.is_some());
}

/// Several writers create one object; one of them has created it, and the others learn that.
#[tokio::test(flavor = "multi_thread")]
async fn one_of_several_creators_wins() {
    let cluster = Cluster::new().await;
    let files: Vec<String> = (0..6)
        .map(|number| {
            let path = format!("{}/{number}.yml", cluster.folder());
            let text = format!("apiVersion: projectcalico.org/v3\nkind: GlobalNetworkSet\nmetadata: {{name: s, labels: {{by: 'w{number}'}}}}\nspec: {{}}\n");
            std::fs::write(&path, text).unwrap();
            format!("create|-f|{path}")
        })
        .collect();
    let outputs = futures::future::join_all(files.iter().map(|line| run(&cluster, line))).await;
    let won: Vec<usize> =
        outputs.iter().enumerate().filter(|(_, (code, _))| *code == 0).map(|(number, _)| number).collect();
    assert_eq!(won.len(), 1, "{outputs:?}");
    let set = stored(&cluster, Kind::GlobalNetworkSet, "s").await.unwrap();
    assert_eq!(set["metadata"]["labels"]["by"], format!("w{}", won[0]));
}

/// Two writers add labels to one object at the same time; none is lost.
#[tokio::test(flavor = "multi_thread")]
async fn changes_of_several_writers_are_all_kept() {
    let cluster = Cluster::new().await;
    let file = cluster.file(POLICIES).display().to_string();
    assert_eq!(run(&cluster, &format!("apply|-f|{file}")).await.0, 0);
    let commands = (0..8).map(|number| format!("label|gns/office|l{number}=x"));
    let lines: Vec<String> = commands.collect();
    let outputs = lines.iter().map(|line| run(&cluster, line));
    for (code, printed) in futures::future::join_all(outputs).await {
        assert_eq!(code, 0, "{printed}");
    }
    let office = stored(&cluster, Kind::GlobalNetworkSet, "office").await.unwrap();
    assert_eq!(office["metadata"]["labels"].as_object().unwrap().len(), 8);
}
