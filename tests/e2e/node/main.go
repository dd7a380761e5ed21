// Command node has the programs of a node in one binary, for tests: its first argument names the program to run.
//
//	node kubelet --config=…
//	node kube-proxy --config=…
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// programs maps the name of each program to its command.
var programs = map[string]func() *cobra.Command{
	"kubelet":    func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
	"kube-proxy": proxy.NewProxyCommand,
}

func main() {
	if len(os.Args) < 2 || programs[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "node: the first argument must be kubelet or kube-proxy")
		os.Exit(2)
	}
	command := programs[os.Args[1]]
	// A program parses os.Args: it must see its own name first.
	os.Args = os.Args[1:]
	os.Exit(cli.Run(command()))
}
