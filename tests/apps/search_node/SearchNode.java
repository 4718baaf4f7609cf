import java.util.List;
import java.util.Map;
import org.opensearch.Version;
import org.opensearch.common.settings.Settings;
import org.opensearch.index.mapper.MapperExtrasPlugin;
import org.opensearch.index.reindex.ReindexPlugin;
import org.opensearch.node.InternalSettingsPreparer;
import org.opensearch.node.Node;
import org.opensearch.painless.PainlessPlugin;
import org.opensearch.transport.Netty4Plugin;

/** One OpenSearch node with the modules that tests need, in the directory and on the port of the arguments. */
public final class SearchNode extends Node {
    private SearchNode(Settings settings) {
        super(
            InternalSettingsPreparer.prepareEnvironment(settings, Map.of(), null, () -> "tests"),
            List.of(
                Netty4Plugin.class,
                ReindexPlugin.class,
                PainlessPlugin.class,
                MapperExtrasPlugin.class),
            false);
    }

    public static void main(String[] arguments) throws Exception {
        Settings settings = Settings.builder()
            .put("path.home", arguments[0])
            .put("http.port", arguments[1])
            .put("network.host", "127.0.0.1")
            .put("http.max_content_length", "10mb")
            .put("transport.port", "0")
            .put("path.repo", arguments[0] + "/snapshots")
            .put("discovery.type", "single-node")
            .put("cluster.name", "tests")
            .put("cluster.routing.allocation.disk.threshold_enabled", false)
            .build();
        Node node = new SearchNode(settings);
        Runtime.getRuntime().addShutdownHook(new Thread(() -> {
            try {
                node.close();
            } catch (Exception error) {
                error.printStackTrace();
            }
        }));
        node.start();
        Thread.currentThread().join();
    }
}
