//! Command lines of calicoctl v3.30 to v3.32: the same words have the same effect, and succeed or fail alike. The wording
//! of the output is Tortie's.

use serde_json::{Value, json};
use tortie_api::{Key, Kind};
use tortie_store::Store;

use crate::served::support::{Cluster, text_of};

const POLICIES: &str = "apiVersion: projectcalico.org/v3
kind: NetworkPolicy
metadata: {name: web, namespace: shop}
spec: {selector: app == 'web', types: [Ingress]}
---
apiVersion: projectcalico.org/v3
kind: GlobalNetworkPolicy
metadata: {name: all}
spec: {selector: all(), order: 100}
";
const POOL: &str = "apiVersion: projectcalico.org/v3
kind: IPPool
metadata: {name: pods}
spec: {cidr: 10.0.0.0/16, blockSize: 26, vxlanMode: Always}
";
const BAD: &str = "apiVersion: projectcalico.org/v3
kind: NetworkPolicy
metadata: {name: bad, namespace: shop}
spec: {selector: app = 'web'}
";

/// One after another, on one datastore. FILE stands for the folder of the files.
const LINES: &[(&str, i32, &str)] = &[
    // create, with files, folders and standard input
    ("create -f FILE/policies.yml", 0, "NetworkPolicy shop/web created"),
    ("create -f FILE/policies.yml", 2, "NetworkPolicy shop/web exists already"),
    ("create --filename=FILE/policies.yml --skip-exists", 0, "NetworkPolicy shop/web skipped"),
    ("create -f FILE/pool.yml -f FILE/policies.yml --skip-exists", 0, "IPPool pods created"),
    ("create -f FILE/bad.yml", 2, "spec.selector"),
    ("create -f FILE/nameless.yml -n shop", 0, "NetworkSet shop/nameless created"),
    ("create -f FILE/policies.yml --namespace other", 2, "namespace other is wanted"),
    ("create -f FILE/absent.yml", 2, "absent.yml"),
    ("create", 2, "required"),
    ("create -f FILE/empty", 2, "the folder has no manifests"),
    ("create -f FILE/empty --skip-empty", 0, ""),
    ("create -f FILE/none.yml", 2, "there are no objects"),
    ("create -f FILE/none.yml --skip-empty", 0, ""),
    // apply
    ("apply -f FILE/policies.yml", 0, "NetworkPolicy shop/web unchanged"),
    ("apply -f FILE/deep", 2, "read only with -R"),
    ("apply -R -f FILE/deep", 0, "GlobalNetworkSet deep created"),
    ("apply --recursive --filename FILE/deep", 0, "GlobalNetworkSet deep unchanged"),
    ("apply -f FILE/policies.yml --allow-version-mismatch", 0, "unchanged"),
    ("apply -f FILE/nameless.yml -n shop", 0, "NetworkSet shop/nameless unchanged"),
    ("replace -f FILE/nameless.yml", 2, "NetworkSet default/nameless does not exist"),
    ("apply -f FILE/policies.yml --skip-exists", 2, "--skip-exists has an effect with create only"),
    // replace
    ("replace -f FILE/policies.yml", 0, "GlobalNetworkPolicy all unchanged"),
    ("replace -f FILE/other.yml", 2, "GlobalNetworkSet other does not exist"),
    ("replace -f FILE/bad.yml", 2, "spec.selector"),
    // convert
    ("convert -f FILE/policies.yml", 0, "kind: GlobalNetworkPolicy"),
    ("convert --filename FILE/policies.yml --output=json", 0, "\"kind\": \"List\""),
    ("convert -f FILE/bad.yml", 2, "spec.selector"),
    ("convert -f FILE/absent.yml", 2, "absent.yml"),
    ("convert", 2, "required"),
    // get
    ("get networkpolicy -n shop", 0, "web"),
    ("get networkPolicy web -n shop", 0, "web"),
    ("get networkpolicies --namespace=shop -o wide", 0, "INGRESS"),
    ("get np -n shop -o ps", 0, "TIER"),
    ("get networkpolicy web --namespace shop --output=yaml", 0, "kind: NetworkPolicy"),
    ("get networkpolicy web -n shop -o json", 0, "\"kind\": \"NetworkPolicy\""),
    (
        "get networkpolicy web -n shop -o jsonpath={.metadata} --export",
        0,
        "{\"name\":\"web\",\"namespace\":\"shop\"}",
    ),
    ("get networkpolicy -a", 0, "shop"),
    ("get networkpolicy -A", 0, "shop"),
    ("get networkpolicy --all-namespaces -o custom-columns=NAME:.metadata.name", 0, "NAME\nweb\n"),
    ("get policy -n shop", 0, "web"),
    ("get pols -a", 0, "web"),
    ("get pools", 0, "10.0.0.0/16"),
    ("get weps -n shop", 0, "one-k8s-p-eth0"),
    ("get networkpolices", 2, "did you mean networkpolicies?"),
    ("get ippool -o custom-columns=NAME,CIDR,NAT", 0, "NAME   CIDR          NAT\npods   10.0.0.0/16"),
    ("get ippool -o custom-columns=NAME,PORT", 2, "no heading of ippools"),
    ("get np,ippool -o custom-columns=NAME", 2, "columns of one kind"),
    ("get -f FILE/policies.yml -o name", 0, "networkpolicy.projectcalico.org/web"),
    ("get -f FILE/nameless.yml -n shop -o yml", 0, "kind: NetworkSet"),
    ("get -f FILE/nameless.yml", 1, "default/nameless does not exist"),
    ("get -f FILE/deep -R --skip-empty", 0, "deep"),
    ("get -f FILE/policies.yml nodes", 2, "cannot be used with"),
    ("-l debug get nodes", 0, "one"),
    ("--log-level=warning --allow-version-mismatch get nodes", 0, "one"),
    ("-l loud get nodes", 2, "none of error"),
    ("get networkpolicy absent -n shop", 1, "NetworkPolicy absent does not exist"),
    ("get globalnetworkpolicy all -o yaml", 0, "order: 100"),
    ("get gnp", 0, "all"),
    ("get ippool", 0, "10.0.0.0/16"),
    ("get ippools -o wide", 0, "NAT"),
    ("get ipPool pods -o yaml", 0, "cidr: \"10.0.0.0/16\""),
    ("get nodes", 0, "one"),
    ("get node one -o wide", 0, "one"),
    ("get workloadendpoint -n shop", 0, "one-k8s-p-eth0"),
    ("get wep -a -o wide", 0, "10.0.0.1/32"),
    ("get profiles", 0, "NAME"),
    ("get bgpconfig default", 1, "does not exist"),
    ("get bgppeers", 0, "PEERIP"),
    ("get felixconfiguration", 0, "NAME"),
    ("get hostendpoints", 0, "INTERFACE"),
    ("get hep -o wide", 0, "PROFILES"),
    ("get globalnetworkset", 0, "deep"),
    ("get tiers", 0, "DEFAULT-ACTION"),
    ("get kubecontrollersconfigurations", 0, "NAME"),
    ("get clusterinformation", 0, "NAME"),
    ("get ipreservations", 0, "CIDRS"),
    ("get blockaffinities", 0, "STATE"),
    ("get stagednetworkpolicies -a", 0, "TIER"),
    ("get nonsense", 2, "no kind of object"),
    ("get", 2, "required"),
    ("get networkpolicy -o nonsense", 2, "none of wide"),
    ("get networkpolicy -o go-template={{.kind}}", 0, "List"),
    ("get networkpolicy -o go-template={{range.items}}{{.metadata.name}};{{end}}", 0, "web;"),
    ("get networkpolicy -o go-template-file=FILE/names.tpl", 0, "web;"),
    ("get networkpolicy -o go-template={{.kind", 2, "the go-template is not correct"),
    ("get networkpolicy -o jsonpath-file=FILE/names.jsonpath", 0, "web;"),
    // patch
    ("patch networkpolicy web -n shop -p {\"spec\":{\"order\":5}}", 0, "NetworkPolicy shop/web changed"),
    ("patch networkpolicy web -n shop --patch={\"spec\":{\"order\":5}}", 0, "unchanged"),
    ("patch networkpolicy web -n shop -t strategic -p {\"spec\":{\"order\":6}}", 0, "changed"),
    ("patch networkpolicy web -n shop --type=merge -p {\"spec\":{\"order\":7}}", 0, "changed"),
    (
        "patch networkpolicy web -n shop -t json -p [{\"op\":\"replace\",\"path\":\"/spec/order\",\"value\":8}]",
        0,
        "changed",
    ),
    ("patch service s -t strategic -p {\"spec\":{}}", 2, "use --type merge or json"),
    ("patch networkpolicy absent -n shop -p {\"spec\":{\"order\":5}}", 1, "does not exist"),
    ("patch networkpolicy web -n shop -p {\"spec\":{\"oder\":5}}", 1, "unknown field `oder`"),
    ("patch networkpolicy web -n shop -p {", 2, "the patch"),
    ("patch node one -p {\"metadata\":{\"annotations\":{\"x\":\"y\"}}}", 0, "Node one changed"),
    // label
    ("label nodes one cluster=backend", 0, "Node one changed"),
    ("label nodes one cluster=frontend", 1, "--overwrite replaces it"),
    ("label nodes one cluster=frontend --overwrite", 0, "Node one changed"),
    ("label nodes one cluster --remove", 0, "Node one changed"),
    ("label nodes one cluster --remove", 0, "Node one unchanged"),
    ("label nodes one cluster=x --remove", 2, "--remove takes names without values"),
    ("label networkpolicy web -n shop team=a", 0, "changed"),
    ("label nodes absent a=b", 1, "does not exist"),
    // validate is offline
    ("validate -f FILE/policies.yml", 0, "2 objects in 1 file: 0 errors"),
    ("validate -f FILE/bad.yml", 1, "error[invalid]: NetworkPolicy shop/bad: spec.selector"),
    ("validate -R -f FILE/deep", 0, "1 object in 1 file"),
    ("validate -f FILE/absent.yml", 2, "absent.yml"),
    // ipam
    ("ipam show", 0, "10.0.0.0/16"),
    ("ipam show --show-blocks", 0, "10.0.0.0/26"),
    ("ipam show --ip=10.0.0.1", 0, "10.0.0.1"),
    ("ipam show --ip=10.0.0.9", 1, "10.0.0.9"),
    ("ipam show --ip=x", 2, "invalid"),
    ("ipam configure --strictaffinity=true", 0, ""),
    ("ipam configure --strict-affinity=true --max-blocks-per-host=10", 0, ""),
    ("ipam configure", 2, "required"),
    ("ipam release --ip=10.0.0.9", 1, "no address was released"),
    ("ipam release", 2, "required"),
    ("ipam split 2 --cidr=10.9.0.0/16", 2, "10.9.0.0/16"),
    ("ipam check", 1, ""),
    // datastore
    ("datastore migrate export", 2, "not locked"),
    ("datastore migrate lock", 0, "locked"),
    ("datastore migrate export", 0, "kind: IPPoolList"),
    ("datastore migrate export --format tortie", 0, "tortie-datastore/1"),
    ("datastore migrate import -f FILE/none.yml", 2, "no export"),
    ("datastore migrate unlock", 0, "unlocked"),
    ("get clusterinformation default -o yaml", 0, "datastoreReady: true"),
    // delete
    ("delete networkpolicy web -n shop", 0, "NetworkPolicy shop/web deleted"),
    ("delete networkpolicy web -n shop", 1, "does not exist"),
    ("delete networkpolicy web -n shop --skip-not-exists", 0, ""),
    ("delete -s networkpolicy web -n shop", 0, ""),
    ("delete -f FILE/nameless.yml -n shop", 0, "NetworkSet shop/nameless deleted"),
    ("delete -f FILE/policies.yml", 1, "GlobalNetworkPolicy all deleted"),
    ("delete gns/deep", 0, "GlobalNetworkSet deep deleted"),
    ("delete -R -f FILE/deep", 1, "does not exist"),
    ("delete ippool pods", 2, "has addresses in use"),
    ("delete", 2, "required"),
    // the rest
    ("version", 0, "client"),
    ("version --client", 0, "client"),
    ("version --client --poll=2s", 2, "cannot be used with"),
    ("version --poll=2", 2, "a number with a unit"),
    ("datastore migrate export --format calico", 2, "not locked"),
    ("nonsense", 2, "unrecognized subcommand"),
    ("--help", 0, "Usage: tortie"),
    ("get --help", 0, "--all-namespaces"),
    ("create --help", 0, "--skip-exists"),
];

#[tokio::test(flavor = "multi_thread")]
async fn command_lines_of_calicoctl_work() {
    let cluster = Cluster::new().await;
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::create_dir_all(at("deep/er")).unwrap();
    std::fs::create_dir_all(at("empty")).unwrap();
    let set = |name: &str| {
        format!(
            "apiVersion: projectcalico.org/v3\nkind: GlobalNetworkSet\nmetadata: {{name: {name}}}\nspec: {{nets: [192.0.2.0/24]}}\n"
        )
    };
    for (name, text) in [
        ("policies.yml", POLICIES),
        ("pool.yml", POOL),
        ("bad.yml", BAD),
        ("none.yml", "---\n"),
        ("names.tpl", "{{range .items}}{{.metadata.name}};{{end}}"),
        ("names.jsonpath", "{range .items[*]}{.metadata.name};{end}"),
        (
            "nameless.yml",
            "apiVersion: projectcalico.org/v3\nkind: NetworkSet\nmetadata: {name: nameless}\nspec: {nets: [192.0.2.0/24]}\n",
        ),
        ("other.yml", &set("other")),
        ("deep/er/set.yml", &set("deep")),
    ] {
        std::fs::write(at(name), text).unwrap();
    }
    cluster.put_endpoint("shop", "one").await;
    let references = json!([{"orchestrator": "k8s", "nodeName": "one"}]);
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "one"}, "spec": {"orchRefs": references}});
    cluster.put(&Key::global(Kind::Node, "one"), node).await;
    let mut allocations = vec![Value::Null; 64];
    allocations[1] = json!(0);
    let unallocated: Vec<usize> = (0..64).filter(|ordinal| *ordinal != 1).collect();
    let block = json!({"cidr": "10.0.0.0/26", "affinity": "host:one", "allocations": allocations, "unallocated": unallocated,
        "attributes": [{"handle_id": "h", "secondary": {"namespace": "shop", "pod": "p", "node": "one"}}], "deleted": false});
    cluster.put(&Key::global(Kind::IpamBlock, "10.0.0.0/26"), block).await;
    let mut wrong = Vec::new();
    for (line, code, expected) in LINES {
        let line = line.replace("FILE", &folder.path().display().to_string());
        let output = cluster.tortie(&line.split(' ').collect::<Vec<_>>()).output().await.unwrap();
        let text = text_of(&output);
        let found = output.status.code();
        if found != Some(*code) || !text.contains(expected) {
            wrong.push(format!("{line}: {found:?}, expected {code} {expected:?}:\n{text}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(LINES.len() >= 100, "{}", LINES.len());
}

/// The configuration file and the environment of calicoctl name the datastore; --store comes before them.
#[tokio::test(flavor = "multi_thread")]
async fn settings_of_calicoctl_name_the_datastore() {
    let cluster = Cluster::new().await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("calicoctl.cfg");
    let text = "apiVersion: projectcalico.org/v3\nkind: CalicoAPIConfig\nspec: {datastoreType: etcdv3, etcdEndpoints: 'http://127.0.0.1:1'}\n";
    std::fs::write(&file, text).unwrap();
    let config = ["get", "nodes", "--config", file.to_str().unwrap()];
    let etcd = [("DATASTORE_TYPE", "etcdv3"), ("ETCD_ENDPOINTS", "http://127.0.0.1:1")];
    for (arguments, variables, store, expected) in [
        (&config[..], &[][..], false, "http://127.0.0.1:1"),
        (&["get", "nodes"], &etcd[..], false, "http://127.0.0.1:1"),
        (&["get", "nodes"], &[("DATASTORE_TYPE", "consul")], false, "neither kubernetes nor etcdv3"),
        (
            &["get", "nodes"],
            &[("DATASTORE_TYPE", "kubernetes"), ("KUBECONFIG", "/nonexistent")],
            false,
            "/nonexistent",
        ),
        (&["get", "nodes", "--tls-key", "x"], &etcd[..], false, "--tls-key has no effect"),
        (&["get", "nodes"], &etcd[..], true, "one"),
    ] {
        let mut command = cluster.tortie(arguments);
        if !store {
            command.env_remove("TORTIE_STORE");
        }
        let output = command.envs(variables.iter().copied()).output().await.unwrap();
        let text = text_of(&output);
        assert!(
            output.status.success() == store && text.contains(expected),
            "{arguments:?} {variables:?}: {text}"
        );
    }
    assert!(cluster.store.get(&Key::global(Kind::Node, "one")).await.unwrap().is_some());
}
