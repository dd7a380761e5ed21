//! The node reports what others have in the kernel, if it may drop what Tortie lets through (policy decision 28).

use std::process::Command;

use crate::common::cluster::two_nodes;
use testkit::Stateful;
use tortie_dataplane::{Condition, Reason, Report};
use tortie_kernel::namespace::NetNs;
use tortie_linux::Dataplane;
use tortie_linux::dataplane::Config;

/// A node with other software.
struct Node {
    namespace: NetNs,
    dataplane: Stateful<Dataplane>,
}

impl Node {
    /// A node whose first state is applied after others have run these shell commands.
    fn beside(others: &str) -> (Self, Report) {
        let namespace = NetNs::create().unwrap();
        run(&namespace, others);
        let dataplane = namespace.run(|| Stateful::new(Dataplane::open(Config::default()).unwrap())).unwrap();
        let mut node = Self { namespace, dataplane };
        let report = node.namespace.run(|| node.dataplane.apply(&[])).unwrap();
        (node, report)
    }

    fn resync(&mut self) -> Report {
        self.namespace.run(|| self.dataplane.resync()).unwrap()
    }
}

/// Runs shell commands in a namespace.
pub(crate) fn run(namespace: &NetNs, script: &str) {
    let mut command = Command::new("sh");
    command.args(["-ec", script]);
    let output = namespace.enter_on_spawn(&mut command).unwrap().output().unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "this test needs nftables and iptables (apt-get install): {script}: {printed}"
    );
}

/// The reasons of the node's conditions, each with texts that its message must contain.
type Expected = &'static [(Reason, &'static [&'static str])];

fn check(case: &str, report: &Report, expected: Expected) {
    let reasons: Vec<_> = report.node.iter().map(|condition| condition.reason).collect();
    assert_eq!(
        reasons,
        expected.iter().map(|(reason, _)| *reason).collect::<Vec<_>>(),
        "{case}: {report:#?}"
    );
    for (Condition { reason, about: _, message }, (_, parts)) in report.node.iter().zip(expected) {
        assert!(!reason.is_failure(), "{case}: it must not hold anything up");
        for part in *parts {
            assert!(message.contains(part), "{case}: {part} in {message}");
        }
    }
    assert!(!report.retry && report.endpoints.is_empty(), "{case}: {report:#?}");
}

const MAY_DROP: Reason = Reason::ForeignChainMayDrop;
const CALICO: Reason = Reason::CalicoLeftover;

/// What kube-proxy 1.36 makes in its nftables mode, for a Service without backends, one with `loadBalancerSourceRanges` and
/// one that works.
const KUBE_PROXY: &str = "nft 'table ip kube-proxy {
    set cluster-ips { type ipv4_addr; elements = { 10.96.0.1, 10.96.0.7 }; };
    map no-endpoint-services {
        type ipv4_addr . inet_proto . inet_service : verdict
        elements = { 10.96.0.7 . tcp . 80 : goto reject-chain, 192.0.2.8 . tcp . 80 : drop }
    }
    map no-endpoint-nodeports {
        type inet_proto . inet_service : verdict; elements = { tcp . 30080 : drop, tcp . 30081 : goto reject-chain }
    }
    map firewall-ips {
        type ipv4_addr . inet_proto . inet_service : verdict
        elements = { 192.0.2.7 . tcp . 80 : goto firewall-QWERTY-default/lb/tcp/http }
    }
    map service-ips {
        type ipv4_addr . inet_proto . inet_service : verdict; elements = { 10.96.0.1 . tcp . 443 : goto service-ABCDEF }
    }
    chain service-ABCDEF { meta l4proto tcp dnat to 192.0.2.1:6443; }
    chain firewall-QWERTY-default/lb/tcp/http { ip saddr != { 198.51.100.0/24 } drop; }
    chain reject-chain { reject; }
    chain cluster-ips-check { ip daddr @cluster-ips reject; ip daddr { 10.96.0.0/12 } drop; }
    chain firewall-check { ip daddr . meta l4proto . th dport vmap @firewall-ips; }
    chain service-endpoints-check { ip daddr . meta l4proto . th dport vmap @no-endpoint-services; }
    chain nodeport-endpoints-check {
        ip daddr != 127.0.0.0/8 meta l4proto . th dport vmap @no-endpoint-nodeports;
    }
    chain services { ip daddr . meta l4proto . th dport vmap @service-ips; }
    chain filter-prerouting-pre-dnat {
        type filter hook prerouting priority -110; ct state new jump firewall-check;
    }
    chain filter-input {
        type filter hook input priority -110; ct state new jump nodeport-endpoints-check;
        ct state new jump service-endpoints-check;
    }
    chain filter-forward {
        type filter hook forward priority -110; ct state new jump service-endpoints-check;
        ct state new jump cluster-ips-check;
    }
    chain nat-prerouting { type nat hook prerouting priority -100; jump services; }
}'";

/// What Docker 28 makes for its bridge, by `iptables-nft`: it drops what is forwarded and none of its own rules accepts.
const DOCKER: &str = "
    iptables-nft -P FORWARD DROP
    for name in DOCKER DOCKER-BRIDGE DOCKER-CT DOCKER-FORWARD DOCKER-ISOLATION-STAGE-1 DOCKER-ISOLATION-STAGE-2 DOCKER-USER; do
        iptables-nft -N $name; done
    iptables-nft -A FORWARD -j DOCKER-USER; iptables-nft -A FORWARD -j DOCKER-FORWARD
    iptables-nft -A DOCKER-FORWARD -j DOCKER-CT; iptables-nft -A DOCKER-FORWARD -j DOCKER-ISOLATION-STAGE-1
    iptables-nft -A DOCKER-FORWARD -j DOCKER-BRIDGE; iptables-nft -A DOCKER-FORWARD -i docker0 -j ACCEPT
    iptables-nft -A DOCKER-CT -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
    iptables-nft -A DOCKER-BRIDGE -o docker0 -j DOCKER; iptables-nft -A DOCKER ! -i docker0 -o docker0 -j DROP
    iptables-nft -A DOCKER-ISOLATION-STAGE-1 -i docker0 ! -o docker0 -j DOCKER-ISOLATION-STAGE-2
    iptables-nft -A DOCKER-ISOLATION-STAGE-2 -o docker0 -j DROP; iptables-nft -A DOCKER-USER -j RETURN
    iptables-nft -t raw -A PREROUTING -d 172.17.0.2 ! -i docker0 -j DROP
    iptables-nft -t nat -N DOCKER; iptables-nft -t nat -A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
    iptables-nft -t nat -A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE";

/// What firewalld 1.3 makes for one zone, without its empty chains.
const FIREWALLD: &str = "nft 'table inet firewalld {
    chain mangle_PREROUTING { type filter hook prerouting priority mangle + 10; jump mangle_PREROUTING_ZONES; }
    chain mangle_PREROUTING_ZONES { return; }
    chain filter_PREROUTING {
        type filter hook prerouting priority filter + 10;
        icmpv6 type { nd-router-advert, nd-neighbor-solicit } accept
        meta nfproto ipv6 fib saddr . mark . iif oif missing drop
    }
    chain filter_INPUT {
        type filter hook input priority filter + 10;
        ct state { established, related } accept
        ct status dnat accept
        iifname lo accept
        ct state invalid drop
        jump filter_INPUT_ZONES
        reject with icmpx admin-prohibited
    }
    chain filter_FORWARD {
        type filter hook forward priority filter + 10;
        ct state { established, related } accept
        ct status dnat accept
        iifname lo accept
        ct state invalid drop
        ip6 daddr { ::/96, 2002::/24 } reject with icmpv6 addr-unreachable
        jump filter_FORWARD_ZONES
        reject with icmpx admin-prohibited
    }
    chain filter_INPUT_ZONES { iifname eth7 goto filter_IN_public; goto filter_IN_public; }
    chain filter_FORWARD_ZONES { iifname eth7 goto filter_FWD_public; goto filter_FWD_public; }
    chain filter_IN_public { tcp dport 22 accept; meta l4proto { icmp, ipv6-icmp } accept; }
    chain filter_FWD_public { oifname eth7 accept; reject with icmpx admin-prohibited; }
}'";

/// Commands of others, and the resulting conditions.
const NFTABLES: [(&str, &str, Expected); 35] = [
    (
        "Docker",
        DOCKER,
        &[
            (
                MAY_DROP,
                &[
                    "table ip filter ",
                    "chain FORWARD (hook forward, priority 0): its policy drops",
                    "`iptables -I DOCKER-USER -s POOL -j ACCEPT`",
                ],
            ),
            (
                MAY_DROP,
                &["table ip raw ", "chain PREROUTING (hook prerouting, priority -300): a rule drops", "let it accept"],
            ),
        ],
    ),
    (
        "firewalld",
        FIREWALLD,
        &[(
            MAY_DROP,
            &[
                "table inet firewalld ",
                "chain filter_FORWARD (hook forward, priority 10): a rule",
                "chain filter_INPUT (hook input, priority 10): a rule",
                "chain filter_PREROUTING (hook prerouting, priority 10): a rule drops",
                "`firewall-cmd --permanent --zone=trusted --add-source=POOL`",
            ],
        )],
    ),
    ("nothing", "true", &[]),
    (
        "a policy",
        "nft add table inet fw; nft 'add chain inet fw f { type filter hook forward priority 5; policy drop; }'",
        &[(MAY_DROP, &["table inet fw ", "chain f (hook forward, priority 5): its policy drops", "nft list table"])],
    ),
    (
        "a policy that is never asked",
        "nft 'table ip fw { chain f { type filter hook forward priority 5; policy drop; counter accept; drop; }; }'",
        &[],
    ),
    (
        "a policy behind a condition",
        "nft 'table ip fw { chain f { type filter hook forward priority 5; policy drop; tcp dport 1 accept; }; }'",
        &[(MAY_DROP, &["its policy drops"])],
    ),
    (
        "a policy behind a return",
        "nft 'table ip fw { chain f { type filter hook forward priority 5; policy drop; return; }; }'",
        &[(MAY_DROP, &["its policy drops"])],
    ),
    (
        "accept only",
        "nft 'table ip fw { chain f { type filter hook forward priority -5; ip saddr 10.0.0.0/8 accept; }; }'",
        &[],
    ),
    (
        "a rule",
        "nft 'table ip6 fw { chain i { type filter hook input priority -5; tcp dport 22 drop; }; }'",
        &[(MAY_DROP, &["table ip6 fw ", "chain i (hook input, priority -5): a rule drops"])],
    ),
    (
        "a rule in a chain that is jumped to, twice",
        "nft 'table inet fw {
            chain c { ct state invalid drop; }; chain b { meta mark 7 goto c; jump d; }; chain d { jump e; }; chain e { };
            chain o { type filter hook output priority 0; tcp dport 1-7 jump b; };
        }'",
        &[(MAY_DROP, &["chain o (hook output, priority 0): a rule of chain c drops"])],
    ),
    (
        "a chain that nothing leads to",
        "nft 'table inet fw { chain c { drop; }; chain f { type filter hook forward priority 0; jump d; }; chain d { }; }'",
        &[],
    ),
    (
        "a rule behind an end",
        "nft 'table inet fw { chain c { return; drop; }; chain f { type filter hook forward priority 0; jump c; }; }'",
        &[],
    ),
    ("a chain without a hook", "nft 'table inet fw { chain c { drop; }; }'", &[]),
    (
        "a map with a drop",
        "nft 'table ip fw {
            chain p { type filter hook prerouting priority raw; tcp dport vmap { 1 : accept, 2 : drop }; };
        }'",
        &[(MAY_DROP, &["chain p (hook prerouting, priority -300): a rule drops"])],
    ),
    (
        "a named map to a chain with a drop",
        "nft 'table ip fw {
            map m { type inet_service : verdict; elements = { 1 : accept, 2 : goto c }; };
            chain c { counter drop; };
            chain p { type filter hook postrouting priority 0; tcp dport vmap @m; };
        }'",
        &[(MAY_DROP, &["chain p (hook postrouting, priority 0): a rule of chain c drops"])],
    ),
    (
        "a map that accepts, and one that nobody asks",
        "nft 'table ip fw {
            map m { type inet_service : verdict; elements = { 2 : drop }; };
            chain p { type filter hook postrouting priority 0; tcp dport vmap { 1 : accept, 2 : return }; };
        }'",
        &[],
    ),
    (
        "a chain in a rule",
        "nft 'table ip fw { chain f { type filter hook forward priority 0; tcp dport 1 jump { udp dport 2 drop; }; }; }'",
        &[(MAY_DROP, &["a rule of chain __chain"])],
    ),
    (
        "a reject",
        "nft 'table ip fw { chain f { type filter hook forward priority 0; tcp dport 1 reject; }; }'",
        &[(MAY_DROP, &["a rule rejects"])],
    ),
    (
        "expressions of all kinds, none of which drops",
        "nft 'table ip fw {
            counter n { }; quota q { over 1 mbytes; }; set s { type ipv4_addr; size 9; flags dynamic,timeout; };
            chain f {
                type filter hook forward priority 0;
                limit rate 1/second counter; meta mark set ct mark; ct mark set meta mark and 7; counter name n; quota name q;
                update @s { ip saddr timeout 1m }; tcp option maxseg size set rt mtu; ip dscp set cs1; fib saddr type local;
                numgen random mod 2 0 counter; log prefix \"x\"; dup to 10.0.0.1; tcp flags syn; ct count over 3 counter;
                jhash ip saddr mod 7 1 counter; osf name \"Linux\"; rt nexthop 10.0.0.1; ipsec in reqid 1; meta length 7 notrack;
            };
            chain p { type filter hook prerouting priority 0; socket transparent 1 counter; tcp dport 7 tproxy to 127.0.0.1:80; };
            chain n { type nat hook postrouting priority 100; masquerade; };
            chain d { type nat hook prerouting priority -100; tcp dport 7 dnat to 10.0.0.1; tcp dport 9 redirect to 8; };
        }'",
        &[],
    ),
    (
        "an expression that does more than we know",
        "nft 'table ip fw { chain i { type filter hook input priority 0; tcp dport 80 synproxy mss 1460; }; }'",
        &[(MAY_DROP, &["a rule does what Tortie does not know (synproxy)"])],
    ),
    (
        "other families, and interfaces",
        "ip link add dev eth7 type dummy 2>/dev/null || true
         nft 'table bridge fw { chain f { type filter hook forward priority 0; policy drop; }; }
            table arp fw { chain i { type filter hook input priority 0; policy drop; }; }
            table netdev fw { chain i { type filter hook ingress device lo priority 0; policy drop; }; }
            table inet fw { chain i { type filter hook ingress device lo priority 0; policy drop; }; }'",
        &[
            (MAY_DROP, &["table inet fw ", "hook ingress of lo, priority 0"]),
            (MAY_DROP, &["table arp fw ", "hook input"]),
            (MAY_DROP, &["table netdev fw ", "hook ingress of lo, priority 0"]),
            (MAY_DROP, &["table bridge fw ", "hook forward"]),
        ],
    ),
    (
        "many chains of one table",
        "for n in 1 2 3 4 5 6; do nft add table ip fw
            nft \"add chain ip fw c$n { type filter hook forward priority $n; policy drop; }\"; done",
        &[(MAY_DROP, &["chain c4 (", "; 2 more chains"])],
    ),
    (
        "a table that sleeps",
        "nft 'table ip fw { flags dormant; chain f { type filter hook forward priority 0; policy drop; }; }'",
        &[],
    ),
    (
        "kube-proxy and a kubelet, by iptables",
        "for name in KUBE-FIREWALL KUBE-FORWARD KUBE-SERVICES KUBE-PROXY-FIREWALL; do iptables-nft -N $name; done
         iptables-nft -A OUTPUT -j KUBE-FIREWALL; iptables-nft -A FORWARD -j KUBE-FORWARD; iptables-nft -A INPUT -j KUBE-SERVICES
         iptables-nft -A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -j DROP
         iptables-nft -A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP; iptables-nft -A FORWARD -j KUBE-PROXY-FIREWALL
         iptables-nft -A KUBE-SERVICES -p tcp -d 10.96.0.7 --dport 80 -j REJECT
         iptables-nft -A KUBE-PROXY-FIREWALL -p tcp -d 192.0.2.7 --dport 80 -j DROP
         iptables-nft -t nat -A POSTROUTING -j MASQUERADE; iptables-nft -t mangle -A FORWARD -j MARK --set-mark 7",
        &[],
    ),
    (
        "kube-proxy by ipvs",
        "for name in KUBE-PROXY-FIREWALL KUBE-SOURCE-RANGES-FIREWALL; do iptables-nft -N $name; done
         iptables-nft -A FORWARD -j KUBE-PROXY-FIREWALL; iptables-nft -A KUBE-SOURCE-RANGES-FIREWALL -j DROP
         iptables-nft -A KUBE-PROXY-FIREWALL -d 192.0.2.7 -j KUBE-SOURCE-RANGES-FIREWALL",
        &[],
    ),
    (
        "kube-proxy by nftables",
        KUBE_PROXY,
        &[],
    ),
    (
        "Tortie's own table of Services",
        "nft 'table inet tortie-services { chain f { type filter hook forward priority 0; tcp dport 1 drop; }; }'",
        &[],
    ),
    (
        "a table of its name in another family",
        "nft 'table ip tortie-services { chain f { type filter hook forward priority 0; tcp dport 1 drop; }; }'",
        &[(MAY_DROP, &["table ip tortie-services ", "a rule drops"])],
    ),
    (
        "a drop without a condition in a chain of kube-proxy",
        "iptables-nft -N KUBE-FORWARD; iptables-nft -A FORWARD -j KUBE-FORWARD; iptables-nft -A KUBE-FORWARD -j DROP",
        &[(MAY_DROP, &["table ip filter ", "chain FORWARD (hook forward, priority 0): a rule of chain KUBE-FORWARD drops"])],
    ),
    (
        "drops beside those of kube-proxy",
        "iptables-nft -N KUBE-FORWARD; iptables-nft -A FORWARD -j KUBE-FORWARD
         iptables-nft -A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
         iptables-nft -A FORWARD -p tcp --dport 25 -j DROP; iptables-nft -P INPUT DROP",
        &[(
            MAY_DROP,
            &[
                "chain FORWARD (hook forward, priority 0): a rule drops",
                "chain INPUT (hook input, priority 0): its policy drops",
            ],
        )],
    ),
    (
        "a chain of kube-proxy's that leads to another drop",
        "iptables-nft -N KUBE-FORWARD; iptables-nft -N MINE; iptables-nft -A FORWARD -j KUBE-FORWARD
         iptables-nft -A KUBE-FORWARD -p tcp -j MINE; iptables-nft -A MINE -s 10.0.0.0/8 -j DROP",
        &[(MAY_DROP, &["a rule of chain MINE drops"])],
    ),
    (
        "names of kube-proxy's in other tables, in base chains and elsewhere in its table",
        "nft 'table ip fw { chain reject-chain { reject; }; chain f { type filter hook forward priority 0; jump reject-chain; }; }
            table inet kube-proxy {
                chain firewall-check { type filter hook forward priority 0; tcp dport 1 drop; };
            }
            table ip kube-proxy {
                chain mine { tcp dport 1 drop; }; chain firewall-x { drop; };
                chain firewall-check { type filter hook forward priority 0; tcp dport 1 drop; };
                chain f { type filter hook forward priority 0; jump mine; };
                chain g { type filter hook forward priority 0; jump firewall-x; };
            }'",
        &[
            (MAY_DROP, &["table inet kube-proxy "]),
            (MAY_DROP, &["table ip fw ", "chain reject-chain rejects"]),
            (
                MAY_DROP,
                &[
                    "table ip kube-proxy ",
                    "chain f (hook forward, priority 0): a rule of chain mine drops",
                    "chain firewall-check (hook forward, priority 0): a rule drops",
                    "a rule of chain firewall-x drops",
                ],
            ),
        ],
    ),
    (
        "targets of iptables",
        "iptables-nft -A FORWARD -j REJECT; iptables-nft -A INPUT -j NFQUEUE; iptables-nft -t raw -A OUTPUT -j CT --notrack
         iptables-nft -A INPUT -m comment --comment x -j LOG; ip6tables-nft -t mangle -A FORWARD -p tcp --syn -j TCPMSS --set-mss 1400",
        &[(MAY_DROP, &["chain FORWARD (hook forward, priority 0): a rule rejects", "asks a program (queue)"])],
    ),
    (
        "leftovers of Calico that judge",
        "iptables-nft -N cali-FORWARD; iptables-nft -N cali-tw-1; iptables-nft -A FORWARD -j cali-FORWARD
         iptables-nft -A cali-FORWARD -j cali-tw-1; iptables-nft -A cali-tw-1 -j DROP
         nft 'table ip6 calico { chain filter-FORWARD { type filter hook forward priority 0; }; }'",
        &[
            (MAY_DROP, &["a rule of chain cali-tw-1 drops"]),
            (CALICO, &["3 chains in the nftables tables ip filter, ip6 calico;", "still judge"]),
        ],
    ),
    (
        "leftovers of Calico that nothing leads to",
        "iptables-nft -t nat -N cali-OUTPUT; iptables-nft -t nat -A cali-OUTPUT -j RETURN",
        &[(CALICO, &["1 chains in the nftables tables ip nat;", "no packet reaches them"])],
    ),
];

#[test]
fn foreign_chains_that_may_drop_are_reported() {
    for (case, others, expected) in NFTABLES {
        let (mut node, report) = Node::beside(others);
        check(case, &report, expected);
        check(case, &node.resync(), expected);
        let again = node.namespace.run(|| node.dataplane.apply(&[])).unwrap();
        check(case, &again, expected);
        // It spares Tortie's table.
        run(&node.namespace, "nft flush ruleset");
        check("nothing is left", &node.resync(), &[]);
    }
}

#[test]
fn later_foreign_chains_are_found_at_the_next_resync() {
    let (mut node, report) = Node::beside("true");
    check("at first", &report, &[]);
    for (case, others, expected) in NFTABLES {
        run(&node.namespace, others);
        // Tortie's own changes do not hide those of others.
        check("before", &node.namespace.run(|| node.dataplane.apply(&[])).unwrap(), &[]);
        check(case, &node.resync(), expected);
        run(&node.namespace, "nft flush ruleset");
        check("after", &node.resync(), &[]);
    }
}

/// The link of kube-proxy has the type `dummy`, which not every kernel has.
#[test]
fn ipvs_that_leads_packets_past_policy_is_reported() {
    let (mut node, report) = Node::beside("ip link add kube-ipvs0 type bridge");
    let expected: Expected = &[(Reason::PolicyBypassed, &["kube-ipvs0", "use kube-proxy's mode nftables"])];
    check("at first", &report, expected);
    check("later", &node.resync(), expected);
    run(&node.namespace, "ip link delete kube-ipvs0");
    check("after", &node.resync(), &[]);
}

#[test]
fn tables_beyond_the_limit_of_a_report_are_counted() {
    let tables = "for n in $(seq 25); do
        echo \"table ip fw$n { chain f { type filter hook forward priority 0; policy drop; }; }\"; done | nft -f -";
    let (_, report) = Node::beside(tables);
    assert_eq!(report.node.len(), 21, "{report:#?}");
    assert!(report.node[20].message.starts_with("5 more foreign tables"), "{report:#?}");
}

/// Commands of others in legacy tables, and the resulting conditions.
const LEGACY: [(&str, &str, Expected); 10] = [
    ("tables that accept", "iptables-legacy -A FORWARD -j ACCEPT; ip6tables-legacy -t raw -L >/dev/null", &[]),
    (
        "Docker's policy",
        "iptables-legacy -P FORWARD DROP; iptables-legacy -N DOCKER-USER; iptables-legacy -A FORWARD -j DOCKER-USER",
        &[(
            MAY_DROP,
            &[
                "the legacy table iptables filter",
                "chain FORWARD (hook forward, priority 0): its policy drops",
                "-I DOCKER-USER -d POOL",
                "`iptables-legacy-save -t filter`",
            ],
        )],
    ),
    (
        "a policy that is never asked",
        "iptables-legacy -P FORWARD DROP; iptables-legacy -A FORWARD -j ACCEPT; iptables-legacy -A FORWARD -j DROP",
        &[],
    ),
    (
        "an acceptance with a comment",
        "iptables-legacy -P FORWARD DROP; iptables-legacy -A FORWARD -m comment --comment all -j ACCEPT",
        &[],
    ),
    (
        "a drop with a comment in a chain of kube-proxy",
        "iptables-legacy -N KUBE-FORWARD; iptables-legacy -A FORWARD -j KUBE-FORWARD
         iptables-legacy -A KUBE-FORWARD -m comment --comment all -j DROP",
        &[(MAY_DROP, &["chain KUBE-FORWARD"])],
    ),
    (
        "drops behind chains, of IPv6",
        "ip6tables-legacy -t mangle -N a; ip6tables-legacy -t mangle -N b; ip6tables-legacy -t mangle -A a -g b
         ip6tables-legacy -t mangle -A b -p tcp -j DROP; ip6tables-legacy -t mangle -A PREROUTING -p tcp -j a",
        &[(MAY_DROP, &["the legacy table ip6tables mangle", "chain PREROUTING (hook prerouting, priority -150): a rule of chain b drops"])],
    ),
    (
        "a chain that nothing leads to, and rules without a target",
        "iptables-legacy -N a; iptables-legacy -A a -j DROP; iptables-legacy -A INPUT -p tcp; iptables-legacy -A INPUT -j LOG",
        &[],
    ),
    (
        "a reject and a queue",
        "iptables-legacy -A FORWARD -p tcp -j REJECT; iptables-legacy -A INPUT -p tcp -j NFQUEUE",
        &[(MAY_DROP, &["a rule rejects", "asks a program (queue)"])],
    ),
    (
        "kube-proxy and a kubelet",
        "for name in KUBE-FIREWALL KUBE-FORWARD KUBE-SERVICES; do iptables-legacy -N $name; done
         iptables-legacy -A OUTPUT -j KUBE-FIREWALL; iptables-legacy -A FORWARD -j KUBE-FORWARD; iptables-legacy -A INPUT -j KUBE-SERVICES
         iptables-legacy -A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -j DROP
         iptables-legacy -A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
         iptables-legacy -A KUBE-SERVICES -p tcp -d 10.96.0.7 --dport 80 -j REJECT",
        &[],
    ),
    (
        "leftovers of Calico",
        "iptables-legacy -N cali-FORWARD; iptables-legacy -A FORWARD -j cali-FORWARD; iptables-legacy -A cali-FORWARD -p tcp -j DROP
         ip6tables-legacy -t nat -N cali-OUTPUT",
        &[
            (MAY_DROP, &["a rule of chain cali-FORWARD drops"]),
            (CALICO, &["2 chains in the legacy tables iptables filter, ip6tables nat;", "still judge"]),
        ],
    ),
];

/// The tables of the legacy iptables are not part of nftables.
#[test]
fn legacy_tables_that_may_drop_are_reported() {
    for (case, others, expected) in LEGACY {
        let (mut node, report) = Node::beside(others);
        check(case, &report, expected);
        check(case, &node.resync(), expected);
    }
}

/// The firewalls do what their conditions say, and nothing is left of it when they are gone.
#[test]
fn what_firewalls_drop_is_named() {
    let (mut nodes, [pod, remote]) = two_nodes();
    let firewalls = [
        (
            DOCKER,
            "nft flush table ip filter; iptables-nft -P FORWARD ACCEPT; nft delete table ip raw",
            "chain FORWARD",
        ),
        (FIREWALLD, "nft delete table inet firewalld", "chain filter_FORWARD"),
        (
            "iptables-legacy -P FORWARD DROP",
            "iptables-legacy -P FORWARD ACCEPT",
            "legacy table iptables filter",
        ),
    ];
    assert!(pod.reaches(&remote, 80));
    for (begin, end, part) in firewalls {
        run(&nodes[0].namespace, begin);
        assert!(pod.is_cut_off(remote.address, 80), "{part}");
        let report = nodes[0].resync();
        let is_named = report.node.iter().any(|one| one.reason == MAY_DROP && one.message.contains(part));
        assert!(is_named, "{part}: {report:#?}");
        assert!(report.node_failures().next().is_none(), "{report:#?}");
        run(&nodes[0].namespace, end);
        assert!(pod.reaches(&remote, 80), "{part}");
        assert!(nodes[0].resync().node.iter().all(|one| !one.message.contains(part)), "{part}");
    }
}
