// Command kube is Kubernetes in one binary, for tests: its first argument names the component to run.
//
//	kube kube-apiserver --etcd-servers=…
//	kube kubectl get nodes
//
// The components share most of their code, so one binary builds in half of the time of four, and has a third of the
// size. etcd is of the version that this Kubernetes is made for, which Debian's is not. To add a component (kubelet,
// kube-proxy), add a line to `components` and run `go mod tidy`.
package main

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

// components maps the name of each component to its main function.
var components = map[string]func(){
	"etcd":                    func() { etcdmain.Main(os.Args) },
	"kube-apiserver":          run(apiserver.NewAPIServerCommand),
	"kube-controller-manager": run(manager.NewControllerManagerCommand),
	"kube-scheduler":          run(func() *cobra.Command { return scheduler.NewSchedulerCommand() }),
	"kubectl":                 run(kubectl.NewDefaultKubectlCommand),
}

func run(command func() *cobra.Command) func() {
	return func() { os.Exit(cli.Run(command())) }
}

func main() {
	if len(os.Args) < 2 {
		usage("no component is named")
	}
	name := os.Args[1]
	component, known := components[name]
	if !known {
		usage(fmt.Sprintf("component %q does not exist", name))
	}
	// A component parses os.Args: it must see its own name first.
	os.Args = os.Args[1:]
	component()
}

// usage reports the mistake and the components, and exits.
func usage(mistake string) {
	var names []string
	for name := range components {
		names = append(names, name)
	}
	slices.Sort(names)
	fmt.Fprintf(os.Stderr, "kube: %s; components: %s\n", mistake, strings.Join(names, ", "))
	os.Exit(2)
}
