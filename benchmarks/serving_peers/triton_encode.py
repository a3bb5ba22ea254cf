"""Encoder in transformer-deploy's manner: ONNX Runtime with all cores, no batching, a request at a time."""

import onnxruntime
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        path = f"{args['model_repository']}/{args['model_version']}/model.onnx"
        options = onnxruntime.SessionOptions()
        # its best on a machine that the client shares: threads that spin for long take the cores from tokenizing
        options.add_session_config_entry("session.intra_op.spin_duration_us", "50")
        options.add_session_config_entry("session.force_spinning_stop", "1")
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.inputs = [tensor.name for tensor in self.session.get_inputs()]
        self.outputs = [tensor.name for tensor in self.session.get_outputs()]

    def execute(self, requests):
        responses = []
        for request in requests:
            feeds = {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self.inputs}
            made = self.session.run(self.outputs, feeds)
            tensors = [pb_utils.Tensor(name, value) for name, value in zip(self.outputs, made, strict=True)]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
